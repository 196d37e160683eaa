"""Calibration of static ranges of K, V and logits on a text."""
