"""Reads folders that other libraries quantized by dequantizing their weights; one file per layout.

Importing this package registers every file in it.
"""

import sys

from diffquant.checkpoints.dequantized.base import (
    LAYOUTS,
    DequantizedCheckpoint,
    EncodedMatrix,
    QuantizedMatrices,
    dequantize_folder,
    register,
)
from diffquant.support.names import import_all

__all__ = ["LAYOUTS", "DequantizedCheckpoint", "EncodedMatrix", "QuantizedMatrices", "dequantize_folder", "register"]

import_all(sys.modules[__name__])
