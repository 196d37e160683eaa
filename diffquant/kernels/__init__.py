"""Triton kernels with their launch code.

`diffquant.attention` and `diffquant.model` decide when they run. Importing this package does not import Triton; only
the modules that contain kernels do.
"""

# Increase it if a change alters stored results, which must then be measured again.
RESULT_VERSION = 1
