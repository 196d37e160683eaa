"""Planning a quantization, rounding weights, writing folders for inference engines, and loading under a recipe."""

# Raise it when a change alters stored results, which are then measured again.
RESULT_VERSION = 1
