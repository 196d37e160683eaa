"""Prefill attention kernels: in half precision, in 8 bits, and with simulated low-bit logits."""
