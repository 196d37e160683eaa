"""Kernels of the packed KV cache: appending to it, and attention that reads it as it is stored."""
