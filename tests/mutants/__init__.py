"""Mutation testing: small faults are planted in a room's code, and its tests should notice each of them."""
