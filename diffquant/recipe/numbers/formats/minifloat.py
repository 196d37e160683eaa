"""Floats of 4, 6 and 8 bits, with scales set by the scheme, or microscaled. Imports no torch."""

import math
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from diffquant.recipe.numbers.formats import NumberFormat, register

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def float_levels(exponent: int, mantissa: int, largest: float) -> tuple[float, ...]:
    """List all numbers up to `largest` of a float with these exponent and mantissa bits and a sign, ascending.

    The bias is 2^(exponent - 1) - 1, and exponent field 0 means subnormal numbers.

    Source: OCP Microscaling Formats 1.0, section 5.3; OCP 8-bit Floating Point 1.0, section 3.
    """
    bias, steps = (1 << (exponent - 1)) - 1, 1 << mantissa
    subnormal = [n / steps * 2.0 ** (1 - bias) for n in range(steps)]
    normal = [(1 + n / steps) * 2.0 ** (e - bias) for e in range(1, 1 << exponent) for n in range(steps)]
    positive = [level for level in subnormal + normal if 0 < level <= largest]
    return (*(-level for level in reversed(positive)), 0.0, *positive)


class Minifloat(NumberFormat):
    """A float with a sign, given numbers of exponent and mantissa bits, and a largest value.

    A code's magnitude is the integer value of its bits without the sign. Bytes hold the bits, with the first code in
    the lowest bits. Larger values are clipped to the largest one; -0 is read as 0.
    """

    def __init__(self, name: str, exponent: int, mantissa: int, largest: float) -> None:
        self.name, self._exponent, self._mantissa = name, exponent, mantissa
        self.levels = float_levels(exponent, mantissa, largest)

    @property
    def width(self) -> int:
        """Number of bits of a code."""
        return 1 + self._exponent + self._mantissa

    @cached_property
    def _top(self) -> int:
        """The largest code."""
        return len(self.levels) // 2

    def encode(self, x: "Tensor", scale: "Tensor") -> "Tensor":
        import torch

        from diffquant.recipe.numbers.absmax import computing_dtype

        ratio = x.to(computing_dtype(x)) / scale
        above, levels_per_unit = self._binades(ratio)
        # A binade has one code per mantissa; rounding up from its last code gives the first code of the next binade.
        code = ratio.mul_(levels_per_unit).round_()
        code += (above << self._mantissa).to(code.dtype).copysign(code)
        return code.clamp_(-self._top, self._top).to(torch.int8)

    def round_to_absmax_levels_(self, ratio: "Tensor") -> "Tensor":
        from diffquant.recipe.numbers.absmax import computing_dtype

        wide = ratio.to(computing_dtype(ratio))
        _, levels_per_unit = self._binades(wide)
        levels = wide.mul_(levels_per_unit).round_().div_(levels_per_unit)
        return ratio.copy_(levels.clamp_(-self.largest, self.largest))

    def _binades(self, ratio: "Tensor") -> "tuple[Tensor, Tensor]":
        """Return each number's binade, from the lowest one, to which subnormal numbers belong, and its levels per unit.

        Args:
            ratio: [...] float32 or float64.
        """
        import torch

        integer, bits, bias = (torch.int64, 52, 1023) if ratio.dtype == torch.float64 else (torch.int32, 23, 127)
        lowest = 2 - (1 << (self._exponent - 1))
        above = ((ratio.abs().view(integer) >> bits) - (bias + lowest)).clamp_(0, 1 << self._exponent)
        return above, ((bias + self._mantissa - lowest - above) << bits).view(ratio.dtype)

    @property
    def packed_dtype(self) -> "torch.dtype":
        import torch

        return torch.uint8

    def packed_width(self, length: int) -> int:
        return -(-length * self.width // 8)

    def pack(self, codes: "Tensor") -> "Tensor":
        import torch

        from diffquant.recipe.numbers.packing import pack

        sign = 1 << (self.width - 1)
        bits = torch.where(codes < 0, sign | codes.neg().to(torch.uint8), codes.to(torch.uint8))
        if self.width == 8:
            return bits
        words = pack((bits - sign).view(torch.int8), self.width)
        return words.view(torch.uint8)[..., : self.packed_width(codes.shape[-1])].contiguous()

    def unpack(self, stored: "Tensor", length: int) -> "Tensor":
        import torch
        from torch.nn.functional import pad

        from diffquant.recipe.numbers.packing import unpack

        sign = 1 << (self.width - 1)
        if self.width == 8:
            bits = stored.view(torch.uint8)
        else:
            whole = pad(stored, (0, -stored.shape[-1] % 4)).contiguous().view(torch.int32)
            bits = unpack(whole, self.width, length).view(torch.uint8) + sign
        magnitude = (bits & (sign - 1)).to(torch.int8)
        return torch.where(bits >= sign, -magnitude, magnitude)


class Float8(Minifloat):
    """An 8-bit float for which torch has a dtype; weights are stored in this dtype.

    Codes of infinity and NaN are read as NaN.

    Source: OCP 8-bit Floating Point 1.0; e4m3 is compressed-tensors' float-quantized.
    """

    is_native = True
    has_stored_shape = False
    has_tiles = True

    @property
    def file_dtype(self) -> "torch.dtype":
        import torch

        dtype: torch.dtype = getattr(torch, {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}[self.name])
        return dtype

    def levels_of(self, codes: "Tensor", dtype: "torch.dtype") -> "Tensor":
        read = self.pack(codes).view(self.file_dtype).to(dtype)
        return read.masked_fill(codes.abs() > self._top, float("nan"))

    @property
    def layout(self) -> str:
        return "float-quantized" if self.name == "e4m3" else f"diffquant-{self.name}"

    @property
    def config_fields(self) -> Mapping[str, Any]:
        # compressed-tensors reads every 8-bit "float" as e4m3, so other formats need another type.
        return {"num_bits": 8, "type": "float" if self.is_in_compressed_tensors else self.name, "symmetric": True}


register(Float8("e4m3", 4, 3, 448))
register(Float8("e5m2", 5, 2, 57344))


_BIAS = 127
# compressed-tensors' layouts; each is for one element type.
_LAYOUTS = {"mxfp4": "mxfp4-pack-quantized", "mxfp6": "mxfp6-pack-quantized", "mxfp8": "mxfp8-quantized"}


class Microscaled(Minifloat):
    """Floats of 4, 6 or 8 bits, where 32 values share a power-of-two scale, stored as its exponent (E8M0).

    OCP's scale exponent is that of the largest magnitude minus that of the largest level. Magnitudes beyond the largest
    level are clipped: E2M1 turns 7 into 6. Formats whose name ends in `_up` raise the exponent by one if the mantissa
    is at least 1.75, as compressed-tensors does when it quantizes (1.9375 in its mxfp6).

    Source: OCP Microscaling Formats 1.0, section 6.3; compressed-tensors 0.20, quantization/utils/mxfp_utils.py.
    """

    block = 32
    has_stored_shape = False
    stored_scales = "uint8"
    trials = (2.0, 1.0, 0.5)

    def __init__(self, name: str, exponent: int, mantissa: int, largest: float, raised_from: float = 2.0) -> None:
        """Make a format.

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

    def scale_for_largest(self, largest: "Tensor", dtype: "torch.dtype | None" = None) -> "Tensor":
        """Return 2^(exponent of the largest magnitude - exponent of the largest level), or 2^-127 if all is zero.

        Args:
            largest: largest magnitudes.
            dtype: dtype of dequantized values, whose range limits the exponent.

        Returns:
            float32, or float64 where `largest` is.
        """
        import torch

        half, exponent = torch.frexp(largest)
        highest = math.frexp(torch.finfo(dtype or largest.dtype).max)[1]
        raised = exponent + ((half * 2 >= self._raised_from) & (exponent < highest))
        biased = raised - 1 - math.frexp(self.largest)[1] + 1 + _BIAS
        return _power_of(torch.where(largest == 0, 0, biased), largest.dtype)

    def round_scale(self, scale: "Tensor", dtype: "torch.dtype") -> "Tensor":
        """Return the power of two nearest to a scale, by ratio."""
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
    def config_fields(self) -> Mapping[str, Any]:
        if not self.is_in_compressed_tensors:
            return {"type": self.name}
        return {"num_bits": self.width, "type": "float", "symmetric": True, "scale_dtype": "torch.uint8"}


def _power_of(biased: "Tensor", dtype: "torch.dtype") -> "Tensor":
    """Return 2^(n - 127) for whole numbers n, clamped to 0 to 254; 255 gives NaN."""
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
