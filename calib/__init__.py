"""Analyses of a model before quantization: outliers, calibration of static ranges, and a search for bit widths."""

# Increase it if a change alters stored results, so that they are measured again.
RESULT_VERSION = 1
