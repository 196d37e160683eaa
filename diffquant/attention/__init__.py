"""Differential attention: its reference implementation, the backends, and the choice among them.

Depends only on torch and numpy.
"""

from diffquant.attention import backends  # noqa: F401  registers them
from diffquant.attention.dispatch import attend, backend_for
from diffquant.attention.logits import LogitMeter
from diffquant.attention.registry import BACKENDS, check_backend

__all__ = ["BACKENDS", "LogitMeter", "attend", "backend_for", "check_backend"]
