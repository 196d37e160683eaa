"""Numbers: formats, what shares a scale, and the tensor functions of absmax quantization, packing and rotation.

The formats and what shares a scale are read without torch.
"""

# Raise it when a change alters stored results, which are then measured again.
RESULT_VERSION = 1
