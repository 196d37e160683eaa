"""Calibration of static quantization ranges of K, V and attention logits on a text."""
