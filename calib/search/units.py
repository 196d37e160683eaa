"""Units, each of which gets a width of its own: a weight, or a layer's K cache, V cache or logits."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from diffquant.errors import UsageError
from diffquant.model.blocks import TokenRows
from diffquant.model.modeling import DiffTransformer
from diffquant.quantization.plan import plan_quantization
from diffquant.quantization.rounded_weight import as_stored
from diffquant.quantization.roundings import Rounder
from diffquant.quantization.roundings.nearest import round_to_nearest
from diffquant.recipe import Recipe
from diffquant.recipe.targets import CALIBRATED_TARGETS, DEFAULT_GRANULARITY
from diffquant.scheme import FULL, Scheme
from diffquant.source.source import Source
from diffquant.sweep.storage import state_bytes_per_token

TARGETS = ("weights", *CALIBRATED_TARGETS)
_WIDTHS = range(2, 9)


@dataclass(frozen=True, eq=False, kw_only=True)
class Unit:
    """A tensor whose width is chosen. Both maps of a pair lie in one: they never differ in bits.

    Attributes:
        target: "weights", "k", "v" or "logits".
        name: the weight's module as the checkpoint has it, or the layer's attention and the target.
        layer: number of its layer.
        kind: name inside a layer, such as "mlp.up_proj" or "logits".
        granularity: granularity of its scheme, which says what shares one scale.
        elements: entries of the weight, or entries a token of the cache; 1 for logits.
        stored: bytes at each width from 2 to 8 bits, scales included: a weight's as `quantize` writes it, K's or V's of
            a token as the cache holds it; for logits, which nothing stores, those of the codes.
        parameter: name of the model's parameter, for weights.
        dtype: dtype in which the weight is written.
    """

    target: str
    name: str
    layer: int
    kind: str
    granularity: str
    elements: int
    stored: Mapping[int, float]
    parameter: str = ""
    dtype: torch.dtype = torch.float32

    def scheme(self, bits: int) -> Scheme:
        """The unit's scheme at a width."""
        return Scheme.parse(f"{bits}:{self.granularity}", target=self.target)

    @property
    def in_attention(self) -> bool:
        """Whether its error reaches the output projection's input."""
        return not self.kind.startswith(("mlp", "self_attn.o_proj"))


def find_units(source: Source, targets: Sequence[str], granularity: str) -> list[Unit]:
    """Every unit of the targets, layer by layer.

    Args:
        source: checkpoint whose units they are.
        targets: names among `TARGETS`.
        granularity: granularity of the weights; the others have their targets' defaults.

    Raises:
        UsageError: an unknown target, or none.
        DiffQuantError: weights are asked for that cannot be quantized with this granularity.
    """
    unknown = [target for target in targets if target not in TARGETS]
    if unknown or not targets:
        raise UsageError(f"unknown target {', '.join(map(repr, unknown))}; known are {', '.join(TARGETS)}")
    units = _weight_units(source, granularity) if "weights" in targets else []
    for target in CALIBRATED_TARGETS:
        if target in targets:
            elements, stored = _entries(source.architecture.token_rows[0], target)
            units += [
                Unit(
                    target=target,
                    name=f"model.layers.{layer}.self_attn.{target}",
                    layer=layer,
                    kind=target,
                    granularity=DEFAULT_GRANULARITY[target],
                    elements=elements,
                    stored=stored,
                )
                for layer in range(source.layers)
            ]
    return sorted(units, key=lambda unit: unit.layer)


def _entries(rows: TokenRows, target: str) -> tuple[int, dict[int, float]]:
    """Entries of one layer's "k" or "v" a token, and their bytes at each width; of "logits" one entry."""
    if target == "logits":
        return 1, {bits: bits / 8 for bits in _WIDTHS}
    heads, width = rows.keys if target == "k" else rows.values
    schemes = {bits: Scheme.parse(f"{bits}:{DEFAULT_GRANULARITY[target]}") for bits in _WIDTHS}
    return heads * width, {bits: state_bytes_per_token(scheme, heads, width) for bits, scheme in schemes.items()}


def to_recipe(bits: Mapping[Unit, int]) -> Recipe:
    """The recipe of an allocation: each target's commonest width, and an override for whatever differs."""
    schemes = {unit: unit.scheme(width) for unit, width in bits.items()}
    common = {target: _commonest([s for unit, s in schemes.items() if unit.target == target]) for target in TARGETS}
    overrides = {unit.name: scheme for unit, scheme in schemes.items() if scheme != common[unit.target]}
    return Recipe(common["weights"], common["k"], common["v"], common["logits"], overrides=overrides)


@contextmanager
def unit_at_width(model: DiffTransformer, unit: Unit, bits: int) -> Iterator[None]:
    """Put one unit of the model at a width inside the context, and restore the model afterwards."""
    if unit.target == "weights":
        parameter = model.get_parameter(unit.parameter)
        original = parameter.data
        scheme = unit.scheme(bits)
        dtype = scheme.format.scale_dtype(unit.dtype)
        parameter.data = as_stored(Rounder(round_to_nearest), unit.name, original, scheme, dtype)
        try:
            yield
        finally:
            parameter.data = original
        return
    before = model.recipe
    model.apply_recipe(replace(before, overrides={unit.name: unit.scheme(bits)}))
    try:
        yield
    finally:
        model.apply_recipe(before)


def _commonest(schemes: list[Scheme]) -> Scheme:
    return Counter(schemes).most_common(1)[0][0] if schemes else FULL


def _weight_units(source: Source, granularity: str) -> list[Unit]:
    plans = {bits: plan_quantization(source, Recipe.of(weights=f"{bits}:{granularity}")) for bits in _WIDTHS}
    stored = {bits: {tensor.name: tensor.stored_bytes for tensor in plan.tensors} for bits, plan in plans.items()}
    units = []
    for parameter in source.architecture.linear_shapes():
        stored_name = source.adapter.source_name(parameter)
        info = source.checkpoint.tensors[stored_name]
        _, _, layer, kind = parameter.removesuffix(".weight").split(".", 3)
        units.append(
            Unit(
                target="weights",
                name=stored_name.removesuffix(".weight"),
                layer=int(layer),
                kind=kind,
                granularity=granularity,
                elements=torch.Size(info.shape).numel(),
                stored={bits: sizes[stored_name] for bits, sizes in stored.items()},
                parameter=parameter,
                dtype=source.checkpoint.written_dtype(stored_name),
            )
        )
    return units
