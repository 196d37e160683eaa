"""Opened checkpoints: their tensors, identity, tokenizer and calibrated ranges."""
