"""A plan of what quantizing a checkpoint will do, tensor by tensor."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from diffquant.errors import CheckpointError
from diffquant.formats.reader import Checkpoint, TensorInfo
from diffquant.formats.writer import OutputTensor
from diffquant.model.adapters import is_read
from diffquant.quantization.checks import EMBEDDING, checked_schemes
from diffquant.quantization.parts import MakersExperts, Part, experts_apart, makers_experts, whole
from diffquant.quantization.targets import targets_of
from diffquant.quantization.unpacked import unpacked_dtypes
from diffquant.recipe import Recipe
from diffquant.report.sizes import compared_size, stored_bits
from diffquant.report.tables import aligned, megabytes
from diffquant.scheme import FULL, Scheme
from diffquant.source.check import surplus_tensors
from diffquant.source.source import Source
from diffquant.source.stored_recipe import stored_dtype, with_stored
from diffquant.source.weight_rules import WeightRules
from diffquant.source.weight_source import WeightSource
from diffquant.support.listing import first_few
from diffquant.support.spelling import spelled

# (module, shape of its weight) -> the modules that it is packed as.
Parted = Callable[[str, tuple[int, ...]], tuple[Part, ...]]


@dataclass(frozen=True)
class PlannedTensor:
    """A source tensor and what becomes of it.

    Attributes:
        name: name of the tensor in the source.
        info: its entry there.
        scheme: scheme that it is packed under; 16 bits for one that is copied.
        outputs: tensors that are written of it.
        parts: modules that it is packed as; none for one that is copied.
    """

    name: str
    info: TensorInfo
    scheme: Scheme
    outputs: tuple[OutputTensor, ...]
    parts: tuple[Part, ...] = ()

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
    """How every tensor of a checkpoint will be stored, in its order.

    Attributes:
        tensors: tensors that are copied or packed.
        linears: every module of the source that is a Linear, packed or not.
        rules: rules that chose the weights of an architecture that is not run; None for one that is.
        run_dtype: dtype that the source runs in, where matrices that are not packed are written in another, or were
            before; else None.
        notes: sentences for people, about what the source's own recipe adds.
    """

    checkpoint: Checkpoint
    recipe: Recipe
    tensors: tuple[PlannedTensor, ...]
    linears: tuple[str, ...]
    rules: WeightRules | None = None
    run_dtype: torch.dtype | None = None
    notes: tuple[str, ...] = ()

    @property
    def packed(self) -> list[PlannedTensor]:
        return [tensor for tensor in self.tensors if tensor.scheme.quantizes]

    @property
    def schemes(self) -> dict[str, Scheme]:
        """Scheme of each module whose weight is packed, as the source names it."""
        return {tensor.module: tensor.scheme for tensor in self.packed}

    @property
    def written_schemes(self) -> dict[str, Scheme]:
        """Scheme of each packed module, as it is written."""
        return {part.module: tensor.scheme for tensor in self.tensors for part in tensor.parts}

    @property
    def written_linears(self) -> list[str]:
        """Every module that a reader will see as a Linear, packed or not."""
        parts = [part.module for tensor in self.tensors for part in tensor.parts if len(part.shape) == 2]
        return list(dict.fromkeys([*self.linears, *parts]))

    @property
    def is_as_the_makers(self) -> bool:
        """Whether experts, and nothing else, are packed as the model's makers do it."""
        return any(isinstance(part, MakersExperts) for tensor in self.tensors for part in tensor.parts)

    @property
    def has_stacked_experts(self) -> bool:
        """Whether experts are packed in one tensor, as nobody else does it."""
        is_stacked = any(len(part.shape) > 2 for tensor in self.tensors for part in tensor.parts)
        return is_stacked and not self.is_as_the_makers

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
        packed = self.packed or self.tensors
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
        return "\n".join([*rows, f"total {self.size}{packed}", *self.notes])

    def _alike_tensors(self) -> dict[tuple[str, tuple[int, ...], Scheme], list[PlannedTensor]]:
        groups: dict[tuple[str, tuple[int, ...], Scheme], list[PlannedTensor]] = {}
        for tensor in self.tensors:
            name = re.sub(r"\.\d+(?=\.)", ".*", tensor.name)
            groups.setdefault((name, tensor.info.shape, tensor.scheme), []).append(tensor)
        return groups


def plan_quantization(
    source: Source | WeightSource, recipe: Recipe, dtype: torch.dtype | None = None
) -> QuantizationPlan:
    """Decide what becomes of each tensor.

    Where the source records a recipe of its cache and logits, that goes along for what `recipe` says nothing of.

    Args:
        dtype: dtype of the matrices that are not packed, as `unpacked_dtypes` takes it.

    Raises:
        CheckpointError: tensors are of a type that is not quantized, the checkpoint is quantized already, or rules
            find no weight in it.
        GroupSizeError: a group size does not divide the width of some tensors.
        UsageError: as `checked_schemes` says.
    """
    _refuse_quantized(source)
    notes: tuple[str, ...] = ()
    if isinstance(source, Source):
        recipe, notes = with_stored(recipe, source.recipe)
    schemes = checked_schemes(source, recipe)
    if schemes and (again := source.checkpoint.rounded_again):
        notes = (*notes, again)
    packed = {name: schemes[module] for module, name in targets_of(source).weights.items() if module in schemes}
    # A recipe of the cache alone copies the weights.
    unpacked = unpacked_dtypes(source, dtype) if packed or dtype else {}
    parted = _parted(source, packed)
    surplus = surplus_tensors(source.checkpoint, source.adapter) if isinstance(source, Source) else ()
    tensors = tuple(
        _planned(name, info, packed.get(name, FULL), source.checkpoint.written_dtype(name), unpacked.get(name), parted)
        for name, info in source.checkpoint.tensors.items()
        if name not in surplus
    )
    _check_names(tensors)
    rules = source.rules if isinstance(source, WeightSource) else None
    is_rounded = bool(unpacked) or stored_dtype(source.checkpoint.config) is not None
    run_dtype = source.dtype if isinstance(source, Source) and is_rounded else None
    plan = QuantizationPlan(source.checkpoint, recipe, tensors, _linears(source), rules, run_dtype, notes)
    return replace(plan, notes=(*notes, *_misread_experts(plan)))


def _parted(source: Source | WeightSource, packed: Mapping[str, Scheme]) -> Parted:
    """The function that says which modules a weight is packed as."""
    if isinstance(source, Source) and source.architecture.makers_pack_experts:
        shapes = source.checkpoint.tensors
        if all(scheme.format.name == "nvfp4" and len(shapes[name].shape) > 2 for name, scheme in packed.items()):
            return makers_experts
    # What runs such experts here reads them as they lie.
    return whole if is_read(source.checkpoint.config) else experts_apart


def _misread_experts(plan: QuantizationPlan) -> list[str]:
    """A sentence on experts that transformers reads otherwise than they are stored, without an error."""
    formats = {
        scheme.format.name
        for module, scheme in plan.written_schemes.items()
        if scheme.format.spans_tensor and re.search(r"experts\.\d+\.", module)
    }
    if not formats:
        return []
    return [
        f"transformers (5.24) leaves out the tensor scale of experts in {' and '.join(sorted(formats))}, and has them "
        f"hundreds of times too large: give them another format for it, such as {spelled('weights', 'mxfp4')}"
    ]


def _linears(source: Source | WeightSource) -> tuple[str, ...]:
    """Every module that a reader may see as a Linear."""
    if isinstance(source, WeightSource):
        modules = source.matrices()
    else:
        modules = [module for module, name in targets_of(source).weights.items() if name != module]
    # A tied head has no weight of its own, yet a reader meets its module.
    return tuple(name for name in dict.fromkeys([*modules, "lm_head"]) if name != EMBEDDING)


def _check_names(tensors: Sequence[PlannedTensor]) -> None:
    """Check that no two tensors would be written under one name."""
    counts = Counter(output.name for tensor in tensors for output in tensor.outputs)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise CheckpointError(
            f"{first_few(twice, ', ')} would be written twice: the source has tensors of that name beside the packed "
            "ones; keep those at 16 bits"
        )


def _refuse_quantized(source: Source | WeightSource) -> None:
    entry = source.checkpoint.config.get("quantization_config")
    if entry is not None:
        method = entry.get("quant_method") if isinstance(entry, Mapping) else entry
        raise CheckpointError(
            f"{source.path} is quantized already ({method}): rounding twice only adds error; "
            "start from the 16-bit checkpoint"
        )


def _planned(
    name: str,
    info: TensorInfo,
    scheme: Scheme,
    written: torch.dtype,
    unpacked: torch.dtype | None,
    parted: Parted,
) -> PlannedTensor:
    if not scheme.quantizes:
        return PlannedTensor(name, info, scheme, (OutputTensor(name, unpacked or written, info.shape),))
    parts = parted(name.removesuffix(".weight"), info.shape)
    outputs = tuple(output for part in parts for output in part.outputs(scheme, written))
    return PlannedTensor(name, info, scheme, outputs, parts)
