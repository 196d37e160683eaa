"""Kernels of linear layers with packed weights."""
