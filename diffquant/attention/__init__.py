"""Differential attention: what it is (`DiffSpec`), its plain form, its composed forms, and who chooses.

Needs torch and numpy alone.
"""

from diffquant.attention.backends import BACKENDS, check_backend
from diffquant.attention.dispatch import attend
from diffquant.attention.logits import LogitMeter
from diffquant.family.mask import Mask
from diffquant.family.spec import DiffSpec

__all__ = ["BACKENDS", "DiffSpec", "LogitMeter", "Mask", "attend", "check_backend"]
