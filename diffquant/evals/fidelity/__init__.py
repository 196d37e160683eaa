"""How far a model's next-token distributions are from another's: KL divergence and top-1 agreement over a text."""
