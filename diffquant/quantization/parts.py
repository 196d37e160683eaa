"""Modules that a weight is packed as: one of its own name, or for experts in one tensor one for each matrix of each.

Stock loaders read packed experts as Linears by these names (compressed-tensors, transformers' conversion of experts,
vLLM's fused layers), and none is known to read them from one tensor.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

# The last part of an expert tensor's name -> the Linears whose rows stand in it one after another.
_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class Part:
    """Rows of a weight that are packed as a module.

    Attributes:
        module: name of the module.
        first, last: first and last (exclusive) row, the rows of all experts counted one after another.
        shape: shape of the module's weight.
    """

    module: str
    first: int
    last: int
    shape: tuple[int, ...]

    def within(self, first: int, last: int) -> slice:
        """The rows of the part among those from `first` to `last`, counted from `first`."""
        return slice(max(self.first, first) - first, min(self.last, last) - first)


def whole(module: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
    """A weight as one module."""
    rows = 1
    for length in shape[:-1]:
        rows *= length
    return (Part(module, 0, rows, shape),)


def experts_apart(module: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
    """The Linears of experts [experts, out, in] that stock loaders have names for; any other weight as one module.

    transformers' fused experts have the gate's rows before those of what it multiplies.
    """
    named = re.fullmatch(r"(.+\.experts)\.(gate_up_proj|down_proj)", module)
    if named is None or len(shape) != 3 or shape[1] % len(_PROJECTIONS[named[2]]):
        return whole(module, shape)
    return tuple(_linears(named[1], shape, _PROJECTIONS[named[2]]))


def _linears(stem: str, shape: tuple[int, ...], projections: tuple[str, ...]) -> Iterator[Part]:
    experts, rows, width = shape
    height = rows // len(projections)
    for expert in range(experts):
        for place, projection in enumerate(projections):
            first = expert * rows + place * height
            yield Part(f"{stem}.{expert}.{projection}", first, first + height, (height, width))
