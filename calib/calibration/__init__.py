"""Static ranges of K, V and logits, found on a text."""
