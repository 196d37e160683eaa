"""A plan of what quantizing a checkpoint will do, tensor by tensor; everything that can be wrong is noticed here."""

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from diffquant.errors import CheckpointError, GroupSizeError, UsageError
from diffquant.formats.compressed_tensors import SCALE, SHAPE, packed_shapes, scale_dtype
from diffquant.formats.reader import Checkpoint, TensorInfo
from diffquant.formats.writer import OutputTensor
from diffquant.quantization.roundings import checked_rounding
from diffquant.quantization.targets import weight_modules, weight_schemes
from diffquant.recipe import Recipe
from diffquant.report.sizes import compared_size, stored_bits
from diffquant.report.tables import aligned, megabytes
from diffquant.scheme import FULL, Scheme
from diffquant.source.check import is_surplus
from diffquant.source.source import Source

_QUANTIZED_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_EMBEDDING = "model.embed_tokens"


@dataclass(frozen=True)
class PlannedTensor:
    """A source tensor and what becomes of it."""

    name: str
    info: TensorInfo
    scheme: Scheme
    outputs: tuple[OutputTensor, ...]

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def elements(self) -> int:
        return torch.Size(self.info.shape).numel()

    @property
    def stored_bytes(self) -> int:
        return sum(output.nbytes for output in self.outputs)

    @property
    def stored_bits(self) -> float:
        """Bits a weight takes, its share of the scales included."""
        return stored_bits(self.stored_bytes, self.elements)


@dataclass(frozen=True)
class QuantizationPlan:
    """What becomes of every tensor of a checkpoint, in its order.

    Attributes:
        tensors: tensors that are copied or packed.
        linears: every module that a reader will see as a Linear, packed or not.
    """

    checkpoint: Checkpoint
    recipe: Recipe
    tensors: tuple[PlannedTensor, ...]
    linears: tuple[str, ...]

    @property
    def schemes(self) -> dict[str, Scheme]:
        """Scheme of each packed module."""
        return {tensor.module: tensor.scheme for tensor in self.tensors if tensor.scheme.quantizes}

    @property
    def bytes_before(self) -> int:
        """Bytes that the source takes."""
        return self.checkpoint.stored_nbytes

    @property
    def bytes_after(self) -> int:
        """Bytes of all tensors to be written."""
        return sum(tensor.stored_bytes for tensor in self.tensors)

    @property
    def weights(self) -> int:
        """Number of weights of all tensors."""
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def packed_bits(self) -> float:
        """Mean stored bits of the packed weights; of all, where none is packed."""
        packed = [tensor for tensor in self.tensors if tensor.scheme.quantizes] or self.tensors
        return stored_bits(sum(t.stored_bytes for t in packed), sum(t.elements for t in packed))

    @property
    def size(self) -> str:
        """Size of all tensors beside the source's."""
        return compared_size(self.bytes_after, self.bytes_before, self.weights)

    def table(self) -> str:
        """A table of the tensors, with the layers' alike ones on one line, and the final size."""
        lines = []
        for (name, shape, scheme), alike in self._alike_tensors().items():
            size = sum(tensor.stored_bytes for tensor in alike)
            lines.append(
                (name, str(len(alike)), str(list(shape)), str(scheme), f"{alike[0].stored_bits:.2f}", megabytes(size))
            )
        rows = aligned(("tensor", "count", "shape", "scheme", "stored bits", "size"), lines)
        packed = f"; packed weights {self.packed_bits:.2f} stored bits each" if self.schemes else ""
        return "\n".join([*rows, f"total {self.size}{packed}"])

    def _alike_tensors(self) -> dict[tuple[str, tuple[int, ...], Scheme], list[PlannedTensor]]:
        groups: dict[tuple[str, tuple[int, ...], Scheme], list[PlannedTensor]] = {}
        for tensor in self.tensors:
            name = re.sub(r"\.layers\.\d+\.", ".layers.*.", tensor.name)
            groups.setdefault((name, tensor.info.shape, tensor.scheme), []).append(tensor)
        return groups


def plan_quantization(source: Source, recipe: Recipe) -> QuantizationPlan:
    """Decide what becomes of each tensor.

    Raises:
        CheckpointError: tensors are of a type that is not quantized, or the checkpoint is quantized already.
        GroupSizeError: a group size does not divide the width of some tensors.
        UsageError: an override matches nothing, or names what stock readers cannot load packed; or the rounding is
            unknown, or cannot do these schemes.
    """
    _refuse_quantized(source)
    tied = source.adapter.architecture.tie_word_embeddings
    schemes = checked_schemes(source, recipe)
    tensors = tuple(
        _planned(name, info, schemes.get(name.removesuffix(".weight"), FULL), source.checkpoint.written_dtype(name))
        for name, info in source.checkpoint.tensors.items()
        if not is_surplus(name, tied)
    )
    # A tied head has no weight of its own, yet a reader meets its module.
    linears = dict.fromkeys([*weight_modules(source.adapter), "lm_head"])
    return QuantizationPlan(source.checkpoint, recipe, tensors, tuple(name for name in linears if name != _EMBEDDING))


def checked_schemes(source: Source, recipe: Recipe) -> dict[str, Scheme]:
    """Scheme of each module that a recipe packs in a 16-bit checkpoint, by the checkpoint's own names.

    Raises:
        CheckpointError: a weight is of a type that is not quantized.
        GroupSizeError: a group size does not divide the width of some tensors; all are named.
        UsageError: an override matches nothing, or names what stock readers cannot load packed; or the rounding is
            unknown, or cannot do these schemes.
    """
    schemes = weight_schemes(source.adapter, recipe)
    _check_overrides(recipe, weight_modules(source.adapter), source.adapter.architecture.tie_word_embeddings)
    recipe.check_layers(source.layers)
    _check_packable(source.checkpoint, schemes)
    checked_rounding(recipe.rounding, schemes)
    return schemes


def _refuse_quantized(source: Source) -> None:
    entry = source.checkpoint.config.get("quantization_config")
    if entry is not None:
        method = entry.get("quant_method") if isinstance(entry, Mapping) else entry
        raise CheckpointError(
            f"{source.path} is quantized already ({method}): rounding twice only adds error; "
            "start from the 16-bit checkpoint"
        )


def _check_overrides(recipe: Recipe, modules: list[str], tied: bool) -> None:
    problems = [
        _no_match_problem(pattern, modules, tied)
        for pattern in recipe.weight_overrides
        if not any(fnmatchcase(module, pattern) for module in modules)
    ]
    if problems:
        raise UsageError("; ".join(problems))


def _no_match_problem(pattern: str, modules: list[str], tied: bool) -> str:
    if tied and fnmatchcase("lm_head", pattern):
        return f"override {pattern!r}: this model's head is its embedding (tie_word_embeddings), which stays 16-bit"
    nearest = difflib.get_close_matches(pattern.replace("*", ""), modules, n=1, cutoff=0.0)
    return f"override {pattern!r} matches no weight; the nearest is {nearest[0]!r}"


def _check_packable(checkpoint: Checkpoint, schemes: Mapping[str, Scheme]) -> None:
    if _EMBEDDING in schemes:
        raise UsageError(
            f"an override quantizes {_EMBEDDING}, and compressed-tensors' readers cannot load a packed embedding; "
            "leave it at 16 bits"
        )
    infos = {f"{module}.weight": checkpoint.tensors[f"{module}.weight"] for module in schemes}
    mistyped = [f"{name} is {info.dtype}" for name, info in infos.items() if info.dtype not in _QUANTIZED_TYPES]
    if mistyped:
        raise CheckpointError(
            f"weights must be float16, bfloat16 or float32 to be quantized: {', '.join(mistyped)}; convert them first"
        )
    misfits: dict[int, dict[str, tuple[int, ...]]] = {}
    for name, info in infos.items():
        size = schemes[name.removesuffix(".weight")].size
        if size and info.shape[1] % size:
            misfits.setdefault(size, {})[name] = info.shape
    if misfits:
        raise GroupSizeError("; ".join(_misfit_problem(size, shapes) for size, shapes in misfits.items()))


def _misfit_problem(size: int, shapes: Mapping[str, tuple[int, ...]]) -> str:
    fitting = math.gcd(size, *(shape[1] for shape in shapes.values()))
    return (
        f"group size {size} does not divide the input width of {len(shapes)} tensors: "
        + ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        + f"; use g{fitting} or row for them, or keep them at 16 bits with an override"
    )


def _planned(name: str, info: TensorInfo, scheme: Scheme, written: torch.dtype) -> PlannedTensor:
    if not scheme.quantizes:
        return PlannedTensor(name, info, scheme, (OutputTensor(name, written, info.shape),))
    module = name.removesuffix(".weight")
    types = {SCALE: scale_dtype(written), SHAPE: torch.int64}
    shapes = packed_shapes(info.shape, scheme)
    outputs = tuple(
        OutputTensor(module + suffix, types.get(suffix, torch.int32), shape) for suffix, shape in shapes.items()
    )
    return PlannedTensor(name, info, scheme, outputs)
