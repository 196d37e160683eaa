"""Methods of a rounding contest: what each makes of a weight, or of one whose model has read a text."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from diffquant.benchmarks.contest import format_error
from research.studies.model_reading import ModelReading

TIERS = ("4.5 bits", "4.125 bits", "6.125 bits", "3.5 bits", "8 bits", "5.125 bits", "3.125 bits")


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


# (name in the checkpoint, weight [out, in] float16) -> the weight quantized.
Quantize = Callable[[str, Tensor], Quantized]

# From a model over a text to the method for its weights.
Over = Callable[[ModelReading], Quantize]


@dataclass(frozen=True)
class Method:
    """A way to quantize the weights of a model.

    Attributes:
        tier: one of `TIERS`; methods of one tier are compared.
        over: function that gives the method for the weights of a model, which has read a text where that is asked for.
        package: package that it needs.
    """

    name: str
    tier: str
    over: Over
    package: str | None = None


def by_itself(quantize: Callable[[Tensor], Quantized]) -> Over:
    """A method for a weight that asks for nothing beside it."""
    return lambda _reading: lambda _name, weight: quantize(weight)


def group_size(width: int, least: int) -> int:
    """Smallest divisor of a weight's width that is no smaller than `least`; the width itself where that is less."""
    return next(size for size in range(min(least, width), width + 1) if width % size == 0)


def reason(error: Exception, method: Method) -> str:
    """Reason why a library's method gave nothing."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed: pip install {method.package}"
    return format_error(error)
