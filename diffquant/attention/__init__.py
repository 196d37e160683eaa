"""Differential attention: what it is (`DiffSpec`), its plain form, its composed forms, and who chooses.

Needs torch and numpy alone.
"""

from diffquant.attention.backends import BACKENDS, check_backend
from diffquant.attention.dispatch import attend
from diffquant.attention.logits import LogitMeter
from diffquant.attention.mask import Mask
from diffquant.attention.spec import DiffSpec

__all__ = ["BACKENDS", "DiffSpec", "LogitMeter", "Mask", "attend", "check_backend"]
