"""Floats of eight bits, under scales of 16 bits that a scheme shares as it likes."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from diffquant.numbers.formats.base import register
from diffquant.numbers.formats.minifloat import Minifloat

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Float8(Minifloat):
    """A float that torch has a dtype of: a weight is stored as a tensor of that.

    Codes without a number, infinite or NaN, are read as NaN.

    Source: OCP 8-bit Floating Point 1.0; e4m3 is compressed-tensors' float-quantized.
    """

    is_native = True
    stores_shape = False
    has_tiles = True

    @property
    def file_dtype(self) -> "torch.dtype":
        import torch

        dtype: torch.dtype = getattr(torch, {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}[self.name])
        return dtype

    def values(self, codes: "Tensor", dtype: "torch.dtype") -> "Tensor":
        read = self.pack(codes).view(self.file_dtype).to(dtype)
        return read.masked_fill(codes.abs() > self._top, float("nan"))

    @property
    def layout(self) -> str:
        return "float-quantized" if self.name == "e4m3" else f"diffquant-{self.name}"

    @property
    def description(self) -> Mapping[str, Any]:
        # compressed-tensors has no other float of eight bits, and none of ours may be read as it.
        return {"num_bits": 8, "type": "float" if self.is_standard else self.name, "symmetric": True}


register(Float8("e4m3", 4, 3, 448))
register(Float8("e5m2", 5, 2, 57344))
