"""Definitions of differential attention: its specification, masks and per-pair norm. Depends only on torch."""
