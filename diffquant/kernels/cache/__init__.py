"""Kernels of the packed KV cache: appending tokens, and decode attention that reads packed codes."""
