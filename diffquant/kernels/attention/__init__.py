"""Kernels for attention of many queries: fused, in 8 bits, and with simulated low-bit logits."""
