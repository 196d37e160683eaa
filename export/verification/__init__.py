"""Proof that an exported folder computes what its checkpoint does."""
