"""Folders that other libraries quantized, read as the floats that their codes stand for; one layout a file.

Importing this package registers every file in it.
"""

import sys

from diffquant.formats.dequantized.base import (
    LAYOUTS,
    Contents,
    DequantizedCheckpoint,
    RoundedMatrix,
    dequantized,
    register,
)
from diffquant.support.discovery import import_all

__all__ = ["LAYOUTS", "Contents", "DequantizedCheckpoint", "RoundedMatrix", "dequantized", "register"]

import_all(sys.modules[__name__])
