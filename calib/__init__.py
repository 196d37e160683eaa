"""Analyses of a model before it is quantized: outliers, static ranges, sensitivity, a search for bits."""
