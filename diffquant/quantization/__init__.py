"""Checkpoints quantized: the verb, its plan, the model card, and how weights are rounded."""
