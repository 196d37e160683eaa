"""Quantization of checkpoints: the verb, its plan, the model card, and the roundings."""
