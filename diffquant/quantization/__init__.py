"""Checkpoints quantized: the verb, its plan, the model card, and the roundings."""
