"""Kernels for products with packed weights."""
