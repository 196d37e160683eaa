"""Modules that a weight is packed as: one of its own name, or for experts in one tensor what others read them from.

Stock loaders read packed experts as a Linear for each matrix of each (compressed-tensors, transformers' conversion of
experts, vLLM's fused layers), and Motif-3's makers from tensors of their own; none is known to read them from one
module.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from diffquant.formats.compressed_tensors import GLOBAL, PACKED, SCALE, packed_once, packed_shapes, packed_types
from diffquant.formats.writer import OutputTensor
from diffquant.scheme import Scheme

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

    def name(self, suffix: str) -> str:
        """Name of the tensor that compressed-tensors calls after the module with a suffix."""
        return self.module + suffix

    def outputs(self, scheme: Scheme, dtype: torch.dtype) -> list[OutputTensor]:
        """The tensors that are written, of a weight that would itself be written in `dtype`."""
        types = packed_types(scheme, dtype)
        return [
            OutputTensor(self.name(suffix), types[suffix], shape)
            for suffix, shape in packed_shapes(self.shape, scheme).items()
        ]

    def once(self, scheme: Scheme) -> Mapping[str, Tensor]:
        """What is written once, by name, under a scheme that is bound to the weight."""
        return {self.name(suffix): data for suffix, data in packed_once(self.shape, scheme).items()}


class MakersExperts(Part):
    """Experts in NVFP4 as Motif-3's own release has them: a tensor of codes, of block scales, and of a multiplier each.

    Source: MotifTechnologies' vLLM port, tools/motif_nvfp4_quantize_ckpt.py.
    """

    method = "modelopt_nvfp4"
    _NAMES = {PACKED: "", SCALE: "_weight_scale", GLOBAL: "_weight_scale_2"}  # noqa: RUF012

    def name(self, suffix: str) -> str:
        return self.module + self._NAMES[suffix]

    def outputs(self, scheme: Scheme, dtype: torch.dtype) -> list[OutputTensor]:
        *rows, above = super().outputs(scheme, dtype)
        return [*rows, OutputTensor(above.name, above.dtype, self.shape[:1])]

    def once(self, scheme: Scheme) -> Mapping[str, Tensor]:
        """The multiplier of each expert, the same for all: a power of two (`Magnitudes`), as its reciprocal is."""
        ((name, divisor),) = super().once(scheme).items()
        return {name: divisor.reciprocal().expand(self.shape[0]).contiguous()}


def whole(module: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
    """A weight as one module."""
    return (Part(module, 0, math.prod(shape[:-1]), shape),)


def makers_experts(module: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
    """Experts in one tensor as Motif-3's makers store them."""
    return (MakersExperts(module, 0, math.prod(shape[:-1]), shape),)


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
