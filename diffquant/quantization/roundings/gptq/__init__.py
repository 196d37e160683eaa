"""Rounding that knows the checkpoint's own inputs: a run over a text, and the compensation made of it."""
