"""Units of a search, each with its own bit width: a weight, or a layer's K cache, V cache or logits."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diffquant.calib.search.result import INTEGERS, Width, count_code_bits, scheme_at
from diffquant.checkpoints.source import Source
from diffquant.errors import UsageError
from diffquant.measure.sweep.subject import cached_bytes_per_token
from diffquant.model.causal import CausalModel
from diffquant.quantization.plan import plan_quantization
from diffquant.quantization.rounded_weight import quantize_as_stored
from diffquant.quantization.roundings import Rounder
from diffquant.quantization.roundings.nearest import round_to_nearest
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import FULL, Scheme
from diffquant.recipe.targets import CALIBRATED_TARGETS, DEFAULT_GRANULARITY, layer_target_name

TARGETS = ("weights", *CALIBRATED_TARGETS)


@dataclass(frozen=True, eq=False, kw_only=True)
class Unit:
    """A tensor whose bit width a search chooses: a weight, or one layer's keys, values or attention logits.

    A unit that gets a width has the heads of both attention maps, so both maps have the same width.

    Attributes:
        target: "weights", "k", "v" or "logits".
        name: name of the weight's module in the checkpoint, or a name such as "model.layers.3.self_attn.k".
        layer: index of its layer.
        kind: name inside a layer, such as "mlp.up_proj" or "logits".
        granularity: granularity of its scales.
        elements: number of elements of the weight, or of K or V per token; 1 for logits.
        stored: size in bytes at each width, scales included. A weight has the size that `quantize` writes, and K or V
            that of a token in the cache. Logits are not stored; their size is that of one code.
        parameter: name of the model's parameter, for weights.
        dtype: dtype in which the weight is written.
        rows: indices of the parameter's rows that the unit consists of, or None if it consists of all rows.
    """

    target: str
    name: str
    layer: int
    kind: str
    granularity: str
    elements: int
    stored: Mapping[Width, float]
    parameter: str = ""
    dtype: torch.dtype = torch.float32
    rows: Tensor | None = None

    def scheme(self, width: Width) -> Scheme:
        """Return the unit's scheme at a width."""
        return scheme_at(width, self.granularity, self.target)


def find_units(
    source: Source, targets: Sequence[str], granularity: str, widths: Sequence[Width] = INTEGERS
) -> list[Unit]:
    """Return all units of the targets, ordered by layer.

    Args:
        source: checkpoint to search.
        targets: names among `TARGETS`.
        granularity: granularity of the weights; other targets have their default granularity.
        widths: widths for which `Unit.stored` is computed.

    Raises:
        UsageError: a target is unknown, or none is given.
        DiffQuantError: the weights cannot be quantized with this granularity.
    """
    unknown = [target for target in targets if target not in TARGETS]
    if not targets:
        raise UsageError(f"no target is given; choose from {', '.join(TARGETS)}")
    if unknown:
        raise UsageError(f"unknown target {', '.join(map(repr, unknown))}; choose from {', '.join(TARGETS)}")
    units = _weight_units(source, granularity, widths) if "weights" in targets else []
    for target in CALIBRATED_TARGETS:
        if target in targets:
            units += [_layer_unit(source, target, layer, widths) for layer in source.architecture.target_layers[target]]
    return sorted(units, key=lambda unit: unit.layer)


def find_unassigned_units(source: Source, granularity: str, widths: Sequence[Width]) -> list[Unit]:
    """Return units that are measured but get no width, ordered by layer.

    There are two kinds: each map's rows of the query projections, and of the key projections if the maps do not share
    keys; and matrices that stay at 16 bits unless an override names them, such as those of λ and of the gate.

    Args:
        source: checkpoint to search.
        granularity: granularity of the weights.
        widths: widths at which they are measured.

    Raises:
        DiffQuantError: a matrix that stays at 16 bits cannot be quantized with this granularity.
    """
    layout, parts = source.architecture.diff_spec.layout, []
    signals_of = {"q_proj": layout.pairs} | ({} if layout.shares_keys else {"k_proj": layout.kv_pairs})
    for parameter, each in source.architecture.parameters.items():
        if ".layers." not in parameter or each.packing == "never":
            continue
        unit = _weight_unit(source, parameter, granularity)
        if each.packing == "named":
            parts.append(unit)
        elif each.projection in signals_of and layout.maps == 2:
            signals, rows = signals_of[each.projection], layout.channel_rows(each.projection)
            for name, of_map in (("signal", rows[:signals]), ("noise", rows[signals:])):
                elements = of_map.numel() * each.shape[-1]
                parts.append(
                    replace(
                        unit,
                        name=f"{unit.name}, {name}",
                        kind=f"{unit.kind}, {name}",
                        rows=of_map.flatten(),
                        elements=elements,
                    )
                )
    named = [unit for unit in parts if unit.rows is None]
    for width in widths if named else ():
        plan_quantization(source, Recipe(overrides={unit.name: unit.scheme(width) for unit in named}))
    return parts


def _layer_unit(source: Source, target: str, layer: int, widths: Sequence[Width]) -> Unit:
    granularity, shapes = DEFAULT_GRANULARITY[target], source.architecture.cached_shapes.get(layer)
    elements, stored = 1, {width: count_code_bits(width) / 8 for width in widths}
    if target != "logits" and shapes is not None:
        heads, channels = shapes.keys if target == "k" else shapes.values
        schemes = {width: scheme_at(width, granularity, target) for width in widths}
        stored = {width: cached_bytes_per_token(scheme, heads, channels) for width, scheme in schemes.items()}
        elements = heads * channels
    return Unit(
        target=target,
        name=layer_target_name(target, layer),
        layer=layer,
        kind=target,
        granularity=granularity,
        elements=elements,
        stored=stored,
    )


def to_recipe(widths: Mapping[Unit, Width]) -> Recipe:
    """Return the recipe with these widths: a target's most common scheme, and overrides for all other units."""
    schemes = {unit: unit.scheme(width) for unit, width in widths.items()}
    common = {target: _commonest([s for unit, s in schemes.items() if unit.target == target]) for target in TARGETS}
    overrides = {unit.name: scheme for unit, scheme in schemes.items() if scheme != common[unit.target]}
    return Recipe(common["weights"], common["k"], common["v"], common["logits"], overrides=overrides)


@contextmanager
def quantize_unit(model: CausalModel, unit: Unit, width: Width) -> Iterator[None]:
    """Quantize one unit of the model to a width inside the context, and restore the model afterwards."""
    if unit.target == "weights":
        parameter = model.get_parameter(unit.parameter)
        original = parameter.data
        scheme = unit.scheme(width)
        dtype = scheme.format.scale_dtype(unit.dtype)
        rounded = quantize_as_stored(Rounder(round_to_nearest), unit.name, original, scheme, dtype)
        parameter.data = rounded if unit.rows is None else original.index_copy(0, unit.rows, rounded[unit.rows])
        try:
            yield
        finally:
            parameter.data = original
        return
    before = model.recipe
    model.apply_recipe(replace(before, overrides={unit.name: unit.scheme(width)}))
    try:
        yield
    finally:
        model.apply_recipe(before)


def _commonest(schemes: list[Scheme]) -> Scheme:
    return Counter(schemes).most_common(1)[0][0] if schemes else FULL


def _weight_units(source: Source, granularity: str, widths: Sequence[Width]) -> list[Unit]:
    plans = {
        width: plan_quantization(source, Recipe.of(weights=str(scheme_at(width, granularity, "weights"))))
        for width in widths
    }
    stored = {width: {tensor.module: tensor.stored_bytes for tensor in plan.tensors} for width, plan in plans.items()}
    units = [_weight_unit(source, parameter, granularity) for parameter in source.architecture.linear_shapes()]
    return [replace(unit, stored={width: sizes[unit.name] for width, sizes in stored.items()}) for unit in units]


def _weight_unit(source: Source, parameter: str, granularity: str) -> Unit:
    stored_name = source.adapter.source_name(parameter)
    _, _, layer, kind = parameter.removesuffix(".weight").split(".", 3)
    return Unit(
        target="weights",
        name=stored_name.removesuffix(".weight"),
        layer=int(layer),
        kind=kind,
        granularity=granularity,
        elements=torch.Size(source.checkpoint.tensors[stored_name].shape).numel(),
        stored={},
        parameter=parameter,
        dtype=source.checkpoint.output_dtype(stored_name),
    )
