"""Analyses of a model's activations: outliers, and where attention goes."""
