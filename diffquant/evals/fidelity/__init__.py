"""Compares two models' next-token distributions over a text: KL divergence and top-1 agreement."""
