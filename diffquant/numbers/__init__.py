"""Pure tensor functions: absmax quantization and dense packing of its codes."""

from diffquant.numbers.absmax import (
    absmax_scale,
    check_finite,
    dequantize,
    max_code,
    quantize,
    sharing_view,
    storable_scale,
)
from diffquant.numbers.packing import pack, packed_words, unpack

__all__ = [
    "absmax_scale",
    "check_finite",
    "dequantize",
    "max_code",
    "pack",
    "packed_words",
    "quantize",
    "sharing_view",
    "storable_scale",
    "unpack",
]
