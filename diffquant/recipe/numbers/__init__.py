"""Number formats, granularities, and tensor functions for absmax quantization, packing and rotation.

Formats and granularities can be parsed without importing torch.
"""

# Raise it when a change alters stored results, which are then measured again.
RESULT_VERSION = 1
