"""Conformance of the op: test vectors, the formula they come from, and whoever computes the op held to them."""
