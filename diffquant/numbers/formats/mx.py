"""Microscaled floats: 32 neighbours share a scale that is a power of two, stored as its exponent in a byte (E8M0).

OCP takes the exponent of the largest magnitude less that of the largest level, so that a magnitude beyond the largest
level is clipped to it: of 7, E2M1 keeps 6. Formats whose name ends in `_up` raise the exponent by one from a mantissa
of 1.75 on, as compressed-tensors does when it quantizes (1.9375 in its mxfp6); what they store is read alike.

Source: OCP Microscaling Formats 1.0, section 6.3; compressed-tensors 0.20, quantization/utils/mxfp_utils.py.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from diffquant.numbers.formats.base import register
from diffquant.numbers.formats.minifloat import Minifloat

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_BIAS = 127
# compressed-tensors' layouts, each of one element type alone.
_LAYOUTS = {"mxfp4": "mxfp4-pack-quantized", "mxfp6": "mxfp6-pack-quantized", "mxfp8": "mxfp8-quantized"}


class Microscaled(Minifloat):
    """Floats of 4, 6 or 8 bits under a power of two a block of 32."""

    block = 32
    stores_shape = False
    trials = (2.0, 1.0, 0.5)

    def __init__(self, name: str, exponent: int, mantissa: int, largest: float, raised_from: float = 2.0) -> None:
        """A format.

        Args:
            raised_from: mantissa, in [1, 2), of the largest magnitude from which its exponent is raised by one.
        """
        super().__init__(name, exponent, mantissa, largest)
        self._raised_from = raised_from

    @property
    def is_native(self) -> bool:  # type: ignore[override]
        return self.width == 8

    @property
    def file_dtype(self) -> "torch.dtype":
        import torch

        if self.width < 8:
            return torch.uint8
        return torch.float8_e4m3fn if self._exponent == 4 else torch.float8_e5m2

    def scale_dtype(self, dtype: "torch.dtype") -> "torch.dtype":  # noqa: ARG002
        import torch

        return torch.float32

    def stored_scale_dtype(self, dtype: "torch.dtype") -> "torch.dtype":  # noqa: ARG002
        import torch

        return torch.uint8

    def reads_scale(self, dtype: "torch.dtype") -> bool:
        import torch

        return dtype == torch.uint8

    def scale_of(self, largest: "Tensor", dtype: "torch.dtype | None" = None) -> "Tensor":
        """2^(exponent of the largest magnitude - that of the largest level), 2^-127 where all is zero.

        Args:
            largest: largest magnitudes.
            dtype: dtype that values are read back in; an exponent whose power it does not have is not raised to.

        Returns:
            float32, or float64 where `largest` is.
        """
        import torch

        half, exponent = torch.frexp(largest)
        highest = math.frexp(torch.finfo(dtype or largest.dtype).max)[1]
        raised = exponent + ((half * 2 >= self._raised_from) & (exponent < highest))
        biased = raised - 1 - math.frexp(self.largest)[1] + 1 + _BIAS
        return _power_of(torch.where(largest == 0, 0, biased), largest.dtype)

    def storable(self, scale: "Tensor", dtype: "torch.dtype") -> "Tensor":
        """The power of two nearest to a scale by the ratio of both."""
        import torch

        half, exponent = torch.frexp(scale.abs().float())
        return _power_of(exponent - 1 + (half > math.sqrt(0.5)) + _BIAS, dtype)

    def pack_scale(self, scale: "Tensor") -> "Tensor":
        import torch

        return (torch.frexp(scale).exponent - 1 + _BIAS).to(torch.uint8)

    def unpack_scale(self, stored: "Tensor", tensor_scale: "Tensor | None" = None) -> "Tensor":  # noqa: ARG002
        import torch

        return _power_of(stored, torch.float32)

    @property
    def layout(self) -> str:
        return _LAYOUTS.get(self.name.removesuffix("_up"), f"diffquant-{self.name}")

    @property
    def description(self) -> Mapping[str, Any]:
        if not self.is_standard:
            return {"type": self.name}
        return {"num_bits": self.width, "type": "float", "symmetric": True, "scale_dtype": "torch.uint8"}


def _power_of(biased: "Tensor", dtype: "torch.dtype") -> "Tensor":
    """2^(n - 127) of whole numbers n, clamped to the bytes from 0 to 254; of the byte 255 NaN."""
    import torch

    if biased.dtype != torch.uint8:
        biased = biased.clamp(0, 254).to(torch.uint8)
    return biased.view(torch.float8_e8m0fnu).to(torch.float32).to(dtype)


for _name, _exponent, _mantissa, _largest, _raised in (
    ("mxfp8", 4, 3, 448.0, 1.75),
    ("mxfp6", 2, 3, 7.5, 1.9375),
    ("mxfp4", 2, 1, 6.0, 1.75),
):
    register(Microscaled(_name, _exponent, _mantissa, _largest))
    register(Microscaled(f"{_name}_up", _exponent, _mantissa, _largest, _raised))
register(Microscaled("mxfp8_e5m2", 5, 2, 57344))
register(Microscaled("mxfp6_e3m2", 3, 2, 28))
