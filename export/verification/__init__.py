"""Verification that an exported folder computes the same as its checkpoint."""
