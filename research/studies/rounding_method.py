"""Methods of a rounding contest: a rule for one weight, or one that reads a text first."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from diffquant.bench.contest.peers import failure
from diffquant.quantization.roundings import Rounder
from diffquant.scheme import Scheme
from research.studies.model_reading import ModelReading

TIERS = ("4.5 bits", "4.125 bits", "6.125 bits", "3.5 bits", "8 bits")


@dataclass(frozen=True)
class Quantized:
    """A weight as a method gives it back.

    Attributes:
        values: weight [out, in] in float32.
        bits: number of bits of the codes at their own width, with scales and zeros.
        held: number of bits of the tensors that the library holds, where codes lie in wider containers; else `bits`.
        product: function that multiplies inputs [..., in] with it, where the library rounds those, too.
    """

    values: Tensor
    bits: int
    held: int
    product: Callable[[Tensor], Tensor] | None = None


# (rule of ours that reads a text, its options, scheme of a weight by its width) -> the rule made ready for the model.
ReadRule = Callable[[str, Mapping[str, Any], Callable[[int], Scheme]], Rounder]

# (name in the checkpoint, weight [out, in] float16) -> the weight quantized.
Prepared = Callable[[str, Tensor], Quantized]

# (name in the checkpoint, weight [out, in] float16, rules of ours that read a text) -> the weight quantized.
Quantize = Callable[[str, Tensor, ReadRule], Quantized]


@dataclass(frozen=True)
class Method:
    """A way to quantize a weight.

    Attributes:
        tier: one of `TIERS`; methods of one tier are compared.
        quantize: function that quantizes a weight.
        package: package that it needs.
    """

    name: str
    tier: str
    quantize: Quantize
    package: str | None = None

    def over(self, reading: ModelReading) -> Prepared:
        """The method for the weights of a model."""
        return lambda name, weight: self.quantize(name, weight, reading.rounder)


@dataclass(frozen=True)
class TextMethod:
    """A way to quantize the weights of a model that has read a text.

    Attributes:
        tier: one of `TIERS`; methods of one tier are compared.
        over: function that gives the method for the weights of a model.
        package: package that it needs.
    """

    name: str
    tier: str
    over: Callable[[ModelReading], Prepared]
    package: str


Contestant = Method | TextMethod


def group_size(width: int, least: int) -> int:
    """Smallest divisor of a weight's width that is no smaller than `least`; the width itself where that is less."""
    return next(size for size in range(min(least, width), width + 1) if width % size == 0)


def reason(error: Exception, method: Method | TextMethod) -> str:
    """Reason why a library's method gave nothing."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed: pip install {method.package}"
    return failure(error)
