"""Attention and linear layers beside their peers, each checked before it is timed."""
