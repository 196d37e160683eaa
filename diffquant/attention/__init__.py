"""Computes differential attention: the reference implementation, the backends, and the choice among them.

Depends only on torch and numpy.
"""

from diffquant.attention import backends  # noqa: F401  registers them
from diffquant.attention.registry import BACKENDS, attend, backend_for, check_backend
from diffquant.family.call import LogitMeter

__all__ = ["BACKENDS", "LogitMeter", "attend", "backend_for", "check_backend"]

# Increase it if a change alters stored results, which must then be measured again.
RESULT_VERSION = 1
