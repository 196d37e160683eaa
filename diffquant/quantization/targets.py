"""Determines which modules a recipe packs and how they are written, and the dtype of the unpacked matrices."""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from diffquant.checkpoints.compressed_tensors import (
    GLOBAL,
    PACKED,
    SCALE,
    make_shape_and_scale,
    packed_dtypes,
    packed_shapes,
)
from diffquant.checkpoints.source import Source
from diffquant.checkpoints.weight_source import WeightSource
from diffquant.checkpoints.writer import OutputTensor
from diffquant.errors import UsageError
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import FULL, Scheme
from diffquant.support.names import option_name

EMBEDDING, _HEAD = "model.embed_tokens", "lm_head"


@dataclass(frozen=True)
class PackableModules:
    """The modules of a checkpoint whose weights can be packed, by name in the checkpoint.

    Attributes:
        weights: name of each module that can be packed -> name of its weight.
        linears: modules that a recipe's `weights` scheme applies to; others are packed only if an override names them.
        is_tied: whether the head shares the embedding's weight.
    """

    weights: Mapping[str, str]
    linears: Collection[str]
    is_tied: bool

    def schemes(self, recipe: Recipe) -> dict[str, Scheme]:
        """Return the scheme of each module whose weight the recipe quantizes.

        Linears have the recipe's `weights` scheme. Embeddings, head, λ projections and weights that the rules exclude
        are quantized only if an override names them. Vectors are never quantized.
        """
        schemes = {module: _scheme_of(module, recipe, self.linears) for module in self.weights}
        return {module: scheme for module, scheme in schemes.items() if scheme.quantizes}

    def has_rounded_input(self, module: str) -> bool:
        """Return whether a recipe's scheme of `activations` applies to a module with a quantized weight.

        It applies to Linears and the head, but not to λ and gate projections, which models compute in float32.
        """
        return module in self.linears or module == _HEAD


def find_packable_modules(source: Source | WeightSource) -> PackableModules:
    """Find the modules of a checkpoint whose weights can be packed, by its adapter or the rules of a `WeightSource`."""
    if isinstance(source, WeightSource):
        is_tied = bool(source.checkpoint.config.get("tie_word_embeddings"))
        return PackableModules(source.packable_weights, set(source.linears), is_tied)
    parameters = source.adapter.source_parameters
    weights = {name.removesuffix(".weight"): name for name, each in parameters.items() if each.packing != "never"}
    linears = {module for module, name in weights.items() if parameters[name].packing == "weights"}
    return PackableModules(weights, linears, source.adapter.architecture.tie_word_embeddings)


def _scheme_of(module: str, recipe: Recipe, linears: Collection[str]) -> Scheme:
    if module in linears:
        return recipe.weight_scheme(module)
    named = (scheme for pattern, scheme in recipe.weight_overrides.items() if _is_meant(pattern, module, linears))
    return next(named, FULL)


def _is_meant(pattern: str, module: str, linears: Collection[str]) -> bool:
    """Return whether a pattern names a head, embedding or λ projection; "*" and "*.layers.0.*" do not."""
    if not fnmatchcase(module, pattern):
        return False
    return module.rsplit(".", 1)[-1] in pattern or not any(fnmatchcase(linear, pattern) for linear in linears)


def unpacked_dtypes(source: Source | WeightSource, dtype: torch.dtype | None = None) -> dict[str, torch.dtype]:
    """Return the dtype in which each matrix is written if it is not packed, by name; only if its dtype changes.

    Unpacked matrices are written in 16 bits: those of a float32 checkpoint become bfloat16, which has the same range,
    and the model still runs in float32. Vectors, whose size is negligible, and tensors of a checkpoint of unknown
    architecture keep their dtype.

    Args:
        dtype: new dtype; by default the checkpoint's, or bfloat16 if that is float32.

    Raises:
        UsageError: `dtype` is given and the architecture is unknown.
    """
    if isinstance(source, WeightSource):
        if dtype is not None:
            raise UsageError(
                f"{source.path} (model_type {source.model_type!r}) is quantized by tensor names, and other "
                f"tensors keep their dtype; leave out {option_name('dtype')}"
            )
        return {}
    own = {name: source.checkpoint.output_dtype(name) for name in find_packable_modules(source).weights.values()}
    if dtype is None and own[source.adapter.source_name(f"{EMBEDDING}.weight")] == torch.float32:
        dtype = torch.bfloat16
    return {} if dtype is None else {name: dtype for name, kind in own.items() if kind != dtype}


# Last part of the name of a tensor of stacked experts -> the Linears whose rows are concatenated in it.
_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class RowRange:
    """A range of a weight's rows that is packed as one module.

    Attributes:
        module: name of the module.
        first, last: first and last (exclusive) row, in the weight flattened to [experts * out, in].
        shape: shape of the module's weight.
    """

    module: str
    first: int
    last: int
    shape: tuple[int, ...]

    def rows_within(self, first: int, last: int) -> slice:
        """Return the rows of this part that are in the weight's rows [first, last), as a slice relative to `first`."""
        return slice(max(self.first, first) - first, min(self.last, last) - first)

    def name(self, suffix: str) -> str:
        """Return the name of the module's tensor with a suffix of compressed-tensors, such as ".weight_packed"."""
        return self.module + suffix

    def output_tensors(self, scheme: Scheme, dtype: torch.dtype) -> list[OutputTensor]:
        """Return the tensors to write for this part; `dtype` is the dtype that it would have if it were not packed."""
        types = packed_dtypes(scheme, dtype)
        return [
            OutputTensor(self.name(suffix), types[suffix], shape)
            for suffix, shape in packed_shapes(self.shape, scheme).items()
        ]

    def shared_tensors(self, scheme: Scheme) -> Mapping[str, Tensor]:
        """Return the tensors that are written once per module, such as the tensor scale, by name.

        Args:
            scheme: scheme that is bound to the weight's largest magnitude.
        """
        return {self.name(suffix): data for suffix, data in make_shape_and_scale(self.shape, scheme).items()}


class Motif3Experts(RowRange):
    """Experts in NVFP4 in the layout of Motif-3's official release: codes, block scales, and one multiplier per expert.

    Source: MotifTechnologies' vLLM port, tools/motif_nvfp4_quantize_ckpt.py.
    """

    method = "modelopt_nvfp4"
    _NAMES = {PACKED: "", SCALE: "_weight_scale", GLOBAL: "_weight_scale_2"}  # noqa: RUF012

    def name(self, suffix: str) -> str:
        return self.module + self._NAMES[suffix]

    def output_tensors(self, scheme: Scheme, dtype: torch.dtype) -> list[OutputTensor]:
        *rows, above = super().output_tensors(scheme, dtype)
        return [*rows, OutputTensor(above.name, above.dtype, self.shape[:1])]

    def shared_tensors(self, scheme: Scheme) -> Mapping[str, Tensor]:
        """Return one multiplier per expert, by name. All experts have the same one, a power of two."""
        ((name, divisor),) = super().shared_tensors(scheme).items()
        return {name: divisor.reciprocal().expand(self.shape[0]).contiguous()}


def as_whole_part(module: str, shape: tuple[int, ...]) -> tuple[RowRange, ...]:
    """Return the whole weight as one module."""
    return (RowRange(module, 0, math.prod(shape[:-1]), shape),)


def as_motif3_experts(module: str, shape: tuple[int, ...]) -> tuple[RowRange, ...]:
    """Return stacked experts as one module, in the layout of Motif-3's official release."""
    return (Motif3Experts(module, 0, math.prod(shape[:-1]), shape),)


def split_experts(module: str, shape: tuple[int, ...]) -> tuple[RowRange, ...]:
    """Split stacked experts [experts, out, in] into the Linears that other libraries expect; keep other weights whole.

    In transformers' fused experts, the rows of the gate projection precede those of the up projection.
    """
    named = re.fullmatch(r"(.+\.experts)\.(gate_up_proj|down_proj)", module)
    if named is None or len(shape) != 3 or shape[1] % len(_PROJECTIONS[named[2]]):
        return as_whole_part(module, shape)
    return tuple(_linears(named[1], shape, _PROJECTIONS[named[2]]))


def _linears(stem: str, shape: tuple[int, ...], projections: tuple[str, ...]) -> Iterator[RowRange]:
    experts, rows, width = shape
    height = rows // len(projections)
    for expert in range(experts):
        for place, projection in enumerate(projections):
            first = expert * rows + place * height
            yield RowRange(f"{stem}.{expert}.{projection}", first, first + height, (height, width))
