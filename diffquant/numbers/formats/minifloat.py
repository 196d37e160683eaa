"""Floats of 4, 6 and 8 bits: their levels, and rounding to the nearest one with ties to an even mantissa. No torch."""

from functools import cached_property
from typing import TYPE_CHECKING

from diffquant.numbers.formats.base import NumberFormat

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def float_levels(exponent: int, mantissa: int, largest: float) -> tuple[float, ...]:
    """All numbers up to `largest` of a float with a sign and the given bits of exponent and mantissa, ascending.

    The bias is 2^(exponent - 1) - 1, and the lowest exponent is that of subnormal numbers.

    Source: OCP Microscaling Formats 1.0, section 5.3; OCP 8-bit Floating Point 1.0, section 3.
    """
    bias, steps = (1 << (exponent - 1)) - 1, 1 << mantissa
    subnormal = [n / steps * 2.0 ** (1 - bias) for n in range(steps)]
    normal = [(1 + n / steps) * 2.0 ** (e - bias) for e in range(1, 1 << exponent) for n in range(steps)]
    positive = [level for level in subnormal + normal if 0 < level <= largest]
    return (*(-level for level in reversed(positive)), 0.0, *positive)


class Minifloat(NumberFormat):
    """A float with a sign, given bits of exponent and mantissa, and a largest number.

    A code's magnitude is the number that its bits without the sign are, and bytes hold the bits, the first code in the
    lowest. What is beyond the largest number becomes that; -0 is read as 0.
    """

    def __init__(self, name: str, exponent: int, mantissa: int, largest: float) -> None:
        self.name, self._exponent, self._mantissa = name, exponent, mantissa
        self.levels = float_levels(exponent, mantissa, largest)

    @property
    def width(self) -> int:
        """Bits of a code."""
        return 1 + self._exponent + self._mantissa

    @cached_property
    def _top(self) -> int:
        """The largest code."""
        return len(self.levels) // 2

    def codes(self, x: "Tensor", scale: "Tensor") -> "Tensor":
        import torch

        from diffquant.numbers.absmax import compute_dtype

        ratio = x.to(compute_dtype(x)) / scale
        lowest = 2 - (1 << (self._exponent - 1))
        binades = 1 << self._exponent
        # How many binades a magnitude lies above the lowest one, which subnormal numbers share.
        above = (torch.frexp(ratio).exponent - 1 - lowest).clamp_(0, binades).masked_fill_(ratio == 0, 0)
        per_step = [2.0 ** (self._mantissa - lowest - n) for n in range(binades + 1)]
        steps = torch.tensor(per_step, dtype=ratio.dtype, device=ratio.device)[above]
        # A binade has as many codes as a mantissa has numbers; a step beyond its last one is the next one's first.
        code = ratio.mul(steps).round_()
        code += (above << self._mantissa).to(code.dtype).copysign(code)
        return code.clamp_(-self._top, self._top).to(torch.int8)

    @property
    def stored_dtype(self) -> "torch.dtype":
        import torch

        return torch.uint8

    def stored_width(self, length: int) -> int:
        return -(-length * self.width // 8)

    def pack(self, codes: "Tensor") -> "Tensor":
        import torch

        from diffquant.numbers.packing import pack

        sign = 1 << (self.width - 1)
        bits = torch.where(codes < 0, sign | codes.neg().to(torch.uint8), codes.to(torch.uint8))
        if self.width == 8:
            return bits
        words = pack((bits - sign).view(torch.int8), self.width)
        return words.view(torch.uint8)[..., : self.stored_width(codes.shape[-1])].contiguous()

    def unpack(self, stored: "Tensor", length: int) -> "Tensor":
        import torch
        from torch.nn.functional import pad

        from diffquant.numbers.packing import unpack

        sign = 1 << (self.width - 1)
        if self.width == 8:
            bits = stored.view(torch.uint8)
        else:
            whole = pad(stored, (0, -stored.shape[-1] % 4)).contiguous().view(torch.int32)
            bits = unpack(whole, self.width, length).view(torch.uint8) + sign
        magnitude = (bits & (sign - 1)).to(torch.int8)
        return torch.where(bits >= sign, -magnitude, magnitude)
