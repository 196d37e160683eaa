"""Differential attention: its plain form, the backends that compute it, and the choice among them.

Needs torch and numpy alone.
"""

from diffquant.attention import backends  # noqa: F401  registers them
from diffquant.attention.dispatch import attend
from diffquant.attention.logits import LogitMeter
from diffquant.attention.registry import BACKENDS, check_backend
from diffquant.family.mask import Mask
from diffquant.family.spec import DiffSpec

__all__ = ["BACKENDS", "DiffSpec", "LogitMeter", "Mask", "attend", "check_backend"]
