"""Helpers that every package needs: files, devices, the machine, versions, progress."""
