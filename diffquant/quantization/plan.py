"""A plan of what quantizing a checkpoint will do, tensor by tensor."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from diffquant.checkpoints.compressed_tensors import INPUT_GLOBAL
from diffquant.checkpoints.opening import find_surplus_tensors
from diffquant.checkpoints.reader import Checkpoint, TensorInfo, merge_stored, read_recorded_dtype
from diffquant.checkpoints.source import Source
from diffquant.checkpoints.weight_source import PackingRules, WeightSource
from diffquant.checkpoints.writer import OutputTensor
from diffquant.errors import CheckpointError
from diffquant.model.adapters import has_adapter
from diffquant.quantization.checks import checked_schemes
from diffquant.quantization.targets import (
    EMBEDDING,
    Motif3Experts,
    RowRange,
    as_motif3_experts,
    as_whole_part,
    find_packable_modules,
    split_experts,
    unpacked_dtypes,
)
from diffquant.recipe import Recipe
from diffquant.recipe.numbers.formats.integer import BYTES
from diffquant.recipe.scheme import FULL, Scheme
from diffquant.reports.tables import align_columns, compare_size, format_size, stored_bits_per_weight
from diffquant.support.names import find_duplicates, first_few, option_name, replace_numbers

# (module, shape of its weight) -> the modules that it is packed as.
Parted = Callable[[str, tuple[int, ...]], tuple[RowRange, ...]]


@dataclass(frozen=True)
class PlannedTensor:
    """A source tensor and how it will be written.

    Attributes:
        name: name of the tensor in the source.
        info: the tensor's entry in the source's header.
        scheme: scheme that the tensor is packed under; 16 bits if it is copied.
        outputs: tensors that are written for it.
        parts: modules that it is packed as; empty if it is copied.
        inputs: scheme of the inputs of these modules while a model runs; 16 bits if they are not rounded.
    """

    name: str
    info: TensorInfo
    scheme: Scheme
    outputs: tuple[OutputTensor, ...]
    parts: tuple[RowRange, ...] = ()
    inputs: Scheme = FULL

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
        """Stored bits per weight, scales included."""
        return stored_bits_per_weight(self.stored_bytes, self.elements)


@dataclass(frozen=True)
class QuantizationPlan:
    """How every tensor of a checkpoint will be stored.

    Attributes:
        tensors: tensors that are copied or packed, in the checkpoint's order.
        linears: every module of the source that is a Linear, packed or not.
        rules: rules that selected the weights by name, or None if diffquant can run the architecture.
        run_dtype: dtype that the model runs in, or None if unpacked matrices are stored in that dtype.
        notes: messages, such as about the recipe that the source records.
        cache_scales: scales of the cache that are stored for engines, by name of their tensors.
        stock_names: names in stock transformers of packed modules, by name in the destination.
        stock_notes: messages about weights that stock transformers cannot read; they are among `notes`.
    """

    checkpoint: Checkpoint
    recipe: Recipe
    tensors: tuple[PlannedTensor, ...]
    linears: tuple[str, ...]
    rules: PackingRules | None = None
    run_dtype: torch.dtype | None = None
    notes: tuple[str, ...] = ()
    cache_scales: Mapping[str, float] = field(default_factory=dict)
    stock_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    stock_notes: tuple[str, ...] = ()

    @property
    def packed(self) -> list[PlannedTensor]:
        return [tensor for tensor in self.tensors if tensor.scheme.quantizes]

    @property
    def schemes(self) -> dict[str, Scheme]:
        """Scheme of each packed module, by name in the source."""
        return {tensor.module: tensor.scheme for tensor in self.packed}

    @property
    def written_schemes(self) -> dict[str, Scheme]:
        """Scheme of each packed module, by name in the destination and by name in stock transformers."""
        return self._with_stock_names({part.module: each.scheme for each in self.tensors for part in each.parts})

    @property
    def written_inputs(self) -> dict[str, Scheme]:
        """Scheme of the inputs of each module whose inputs are rounded, by the same names."""
        rounded = [tensor for tensor in self.tensors if tensor.inputs.quantizes]
        return self._with_stock_names({part.module: each.inputs for each in rounded for part in each.parts})

    def _with_stock_names(self, schemes: dict[str, Scheme]) -> dict[str, Scheme]:
        return {
            name: scheme for module, scheme in schemes.items() for name in self.stock_names.get(module, ())
        } | schemes

    @property
    def written_linears(self) -> list[str]:
        """Names of all modules that are Linears in the destination, packed or not."""
        parts = [part.module for tensor in self.tensors for part in tensor.parts if len(part.shape) == 2]
        return list(dict.fromkeys([*self.linears, *parts]))

    @property
    def has_motif3_layout(self) -> bool:
        """Whether only experts are packed, in the layout of Motif-3's official NVFP4 release."""
        return any(isinstance(part, Motif3Experts) for tensor in self.tensors for part in tensor.parts)

    @property
    def has_stacked_experts(self) -> bool:
        """Whether all experts of a layer are packed in one tensor, a layout that only diffquant uses."""
        is_stacked = any(len(part.shape) > 2 for tensor in self.tensors for part in tensor.parts)
        return is_stacked and not self.has_motif3_layout

    @property
    def bytes_before(self) -> int:
        """Size of the source in bytes."""
        return self.checkpoint.stored_nbytes

    @property
    def bytes_after(self) -> int:
        """Bytes of all tensors to be written."""
        return sum(tensor.stored_bytes for tensor in self.tensors) + 4 * len(self.cache_scales)

    @property
    def weight_count(self) -> int:
        """Number of weights of all tensors."""
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def packed_bits(self) -> float:
        """Mean stored bits per packed weight, or per weight if none is packed."""
        packed = self.packed or self.tensors
        return stored_bits_per_weight(sum(t.stored_bytes for t in packed), sum(t.elements for t in packed))

    @property
    def size_text(self) -> str:
        """The size of all tensors, compared with the source's, as text."""
        return compare_size(self.bytes_after, self.bytes_before, self.weight_count)

    def table(self) -> str:
        """Return a table of the tensors, with one line for equal tensors of all layers, and the total size."""
        groups: dict[tuple[str, tuple[int, ...], Scheme, Scheme], list[PlannedTensor]] = {}
        for tensor in self.tensors:
            key = replace_numbers(tensor.name), tensor.info.shape, tensor.scheme, tensor.inputs
            groups.setdefault(key, []).append(tensor)
        lines = []
        for (name, shape, scheme, inputs), alike in groups.items():
            size = format_size(sum(tensor.stored_bytes for tensor in alike))
            said = f"{scheme}, inputs {inputs}" if inputs.quantizes else str(scheme)
            lines.append((name, str(len(alike)), str(list(shape)), said, f"{alike[0].stored_bits:.2f}", size))
        rows = align_columns(("tensor", "count", "shape", "scheme", "stored bits", "size"), lines)
        packed = f"; packed weights {self.packed_bits:.2f} stored bits each" if self.schemes else ""
        return "\n".join([*rows, f"total {self.size_text}{packed}", *self.notes])


def plan_quantization(
    source: Source | WeightSource, recipe: Recipe, dtype: torch.dtype | None = None
) -> QuantizationPlan:
    """Plan how each tensor of a checkpoint will be stored under a recipe.

    Schemes of cache and logits that the source records are kept unless `recipe` sets them.

    Args:
        dtype: dtype of the matrices that are not packed; by default the checkpoint's, or bfloat16 if that is float32.

    Raises:
        CheckpointError: tensors have a dtype that cannot be quantized, the checkpoint is quantized already, or the
            rules match no weight in it.
        GroupSizeError: a group size does not divide the width of some tensors.
        UsageError: see `checked_schemes`.
    """
    entry = source.checkpoint.config.get("quantization_config")
    if entry is not None and not (isinstance(source, Source) and source.has_only_cache_scales):
        method = entry.get("quant_method") if isinstance(entry, Mapping) else entry
        raise CheckpointError(
            f"{source.path} is quantized already ({method}): rounding twice only adds error; "
            "start from the 16-bit checkpoint"
        )
    notes: tuple[str, ...] = ()
    if isinstance(source, Source):
        recipe, notes = merge_stored(recipe, source.recipe)
    schemes = checked_schemes(source, recipe)
    if schemes and (again := source.checkpoint.requantization_warning):
        notes = (*notes, again)
    targets = find_packable_modules(source)
    packed = {name: schemes[module] for module, name in targets.weights.items() if module in schemes}
    inputs = {
        targets.weights[module]: recipe.input_scheme(module) for module in schemes if targets.has_rounded_input(module)
    }
    # A recipe without low-bit weights copies all weights.
    unpacked = unpacked_dtypes(source, dtype) if packed or dtype else {}
    parted = _choose_parts(source, packed)

    def plan_tensor(name: str, info: TensorInfo) -> PlannedTensor:
        scheme, of_inputs = packed.get(name, FULL), inputs.get(name, FULL)
        written = source.checkpoint.output_dtype(name)
        if not scheme.quantizes:
            return PlannedTensor(name, info, scheme, (OutputTensor(name, unpacked.get(name, written), info.shape),))
        if of_inputs.quantizes and scheme.format.name == BYTES.name:
            scheme = replace(scheme, format=BYTES)
        parts = parted(name.removesuffix(".weight"), info.shape)
        outputs = [output for part in parts for output in part.output_tensors(scheme, written)]
        if of_inputs.format.spans_tensor:
            outputs += [OutputTensor(part.module + INPUT_GLOBAL, torch.float32, (1,)) for part in parts]
        return PlannedTensor(name, info, scheme, tuple(outputs), parts, of_inputs)

    surplus = find_surplus_tensors(source.checkpoint, source.adapter) if isinstance(source, Source) else ()
    listed = ((name, info) for name, info in source.checkpoint.tensors.items() if name not in surplus)
    tensors = tuple(plan_tensor(name, info) for name, info in listed)
    _check_names(tensors)
    rules = source.rules if isinstance(source, WeightSource) else None
    is_rounded = bool(unpacked) or read_recorded_dtype(source.checkpoint.config) is not None
    run_dtype = source.dtype if isinstance(source, Source) and is_rounded else None
    plan = QuantizationPlan(source.checkpoint, recipe, tensors, _linears(source), rules, run_dtype, notes)
    return replace(plan, notes=(*notes, *_engine_notes(plan)))


def _choose_parts(source: Source | WeightSource, packed: Mapping[str, Scheme]) -> Parted:
    """Return the function that maps a weight to the modules it is packed as."""
    if isinstance(source, Source) and source.architecture.makers_pack_experts:
        shapes = source.checkpoint.tensors
        if all(scheme.format.name == "nvfp4" and len(shapes[name].shape) > 2 for name, scheme in packed.items()):
            return as_motif3_experts
    # diffquant's models read stacked experts as stored.
    return as_whole_part if has_adapter(source.checkpoint.config) else split_experts


def _engine_notes(plan: QuantizationPlan) -> Iterator[str]:
    """Yield warnings about weights that transformers would misread, or for which vLLM has no kernel."""
    stacked = [part.module for tensor in plan.tensors for part in tensor.parts if len(part.shape) > 2]
    if stacked and plan.rules is not None:
        yield (
            f"transformers finds no Linear for experts that stay one tensor ({first_few(stacked, ', ')}) and fills "
            f"them with random numbers; to load the folder there, give {option_name('keep', '*experts*')}"
        )
    formats = {
        scheme.format.name
        for module, scheme in plan.written_schemes.items()
        if scheme.format.spans_tensor and re.search(r"experts\.\d+\.", module)
    }
    if formats:
        yield (
            f"transformers (5.24) ignores the tensor scale of experts in {' and '.join(sorted(formats))}, so its "
            "weights are hundreds of times too large; for transformers use, for example, "
            + option_name("weights", "mxfp4")
        )
    if any(tensor.scheme.format is BYTES and tensor.scheme.granularity_size for tensor in plan.tensors):
        yield (
            "vLLM multiplies rounded activations by 8-bit weights only if these have one scale per output channel or "
            f"tensor; to use vLLM, give {option_name('weights', '8:channel')}"
        )


def _linears(source: Source | WeightSource) -> tuple[str, ...]:
    """Return the names of all modules that may be Linears in the loading library."""
    if isinstance(source, WeightSource):
        modules = source.list_possible_linears()
    else:
        modules = [module for module, name in find_packable_modules(source).weights.items() if name != module]
    # A tied head has no weight in the checkpoint, but it is still a module of the loaded model.
    return tuple(name for name in dict.fromkeys([*modules, "lm_head"]) if name != EMBEDDING)


def _check_names(tensors: Sequence[PlannedTensor]) -> None:
    """Check that no two tensors would be written under one name."""
    if twice := find_duplicates(output.name for tensor in tensors for output in tensor.outputs):
        raise CheckpointError(
            f"{first_few(twice, ', ')} would be written twice: the source already has tensors with these names; "
            "keep those weights at 16 bits"
        )
