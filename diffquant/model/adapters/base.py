"""The adapter of a source format, the registry of adapters, and checks that several share."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from diffquant.errors import CheckpointError
from diffquant.family.heads import HeadLayout, Projection
from diffquant.model.architecture import Architecture
from diffquant.model.blocks import Parameter, Parameters, Shape


@dataclass(frozen=True)
class RepeatedHeads:
    """Heads of a source's weight, each of which stands several times in a row in DiffTransformer's.

    Attributes:
        width: number of rows of a head.
        source_heads: number of heads in the source.
        heads: number of heads in DiffTransformer; a multiple of `source_heads`.
    """

    width: int
    source_heads: int
    heads: int

    @cached_property
    def rows(self) -> Tensor:
        """Source row of each row; only asked for once the checkpoint is known to hold the source's rows."""
        head = torch.arange(self.heads) // (self.heads // self.source_heads)
        return (head[:, None] * self.width + torch.arange(self.width)).flatten()


@dataclass(frozen=True)
class Adapter:
    """How a source format stores one model.

    Attributes:
        architecture: model as plain data, with the class that runs it.
        renames: parts of a canonical name that the source spells otherwise, canonical to source.
        repeated: heads that are repeated on load, by their projection.
        may_lack_norm_weight: whether older checkpoints of the format have no weight in the per-pair norm.
    """

    architecture: Architecture
    renames: Mapping[str, str] = field(default_factory=dict)
    repeated: Mapping[Projection, RepeatedHeads] = field(default_factory=dict)
    may_lack_norm_weight: bool = False

    def fitted_to(self, tensors: Collection[str]) -> "Adapter":
        """This adapter, its per-pair norm without a weight where a checkpoint of these tensors is an older one."""
        if not self.may_lack_norm_weight or any(name.endswith(".subln.weight") for name in tensors):
            return self
        spec = replace(self.architecture.diff_spec, post_norm="plain")
        return replace(self, architecture=replace(self.architecture, diff_spec=spec))

    def source_name(self, canonical: str) -> str:
        """The checkpoint's name for a parameter of the model."""
        for ours, theirs in self.renames.items():
            canonical = canonical.replace(ours, theirs)
        return canonical

    @cached_property
    def source_parameters(self) -> Parameters:
        """Each tensor that the checkpoint must hold, by its own name."""
        parameters: Parameters = {}
        for name, parameter in (self.architecture.parameters | self.architecture.carried).items():
            heads = self._repeated(parameter)
            shape = parameter.shape if heads is None else (heads.width * heads.source_heads, *parameter.shape[1:])
            parameters[self.source_name(name)] = replace(parameter, shape=shape)
        return parameters

    def source_shapes(self) -> dict[str, Shape]:
        """Shape of each tensor that the checkpoint must hold, by its own name."""
        return {name: parameter.shape for name, parameter in self.source_parameters.items()}

    def row_order(self, canonical: str) -> Tensor | None:
        """Source row of each row of a parameter of the model, or None if no row moves."""
        heads = self._repeated(self.architecture.parameters[canonical])
        return None if heads is None else heads.rows

    def rows_as(self, layout: HeadLayout, canonical: str) -> Tensor | None:
        """Source row of each row of a parameter whose heads follow `layout`, or None if no row moves."""
        repeated = self.row_order(canonical)
        projection = self.architecture.parameters[canonical].projection
        order = None if projection is None else self.architecture.diff_spec.layout.order_as(layout, projection)
        if order is None or repeated is None:
            return repeated if order is None else order
        return repeated[order]

    def _repeated(self, parameter: Parameter) -> RepeatedHeads | None:
        return self.repeated.get(parameter.projection) if parameter.projection else None


# From a config.json to its adapter.
Reader = Callable[[dict[str, Any]], Adapter]
READERS: dict[str, Reader] = {}
# Types whose readers deal with sliding windows; of all others a config that states one is refused.
WITH_WINDOWS: set[str] = set()


def register(model_type: str, *, windows: bool = False) -> Callable[[Reader], Reader]:
    """Register a function as the reader of config.json files with a `model_type`.

    Args:
        windows: whether the reader deals with sliding windows, which are refused otherwise.

    Raises:
        ValueError: another function reads that type.
    """

    def add(reader: Reader) -> Reader:
        if model_type in READERS:
            raise ValueError(f"model_type {model_type!r} has a reader already")
        READERS[model_type] = reader
        if windows:
            WITH_WINDOWS.add(model_type)
        return reader

    return add


def refuse_windows(config: Mapping[str, Any]) -> None:
    """Refuse a sliding window: a model trained with one would compute something else, and say nothing.

    Raises:
        CheckpointError: a window is switched on.
    """
    # Configurations may keep a window's size beside a switch that is off.
    if config.get("sliding_window") is not None and config.get("use_sliding_window") is not False:
        raise CheckpointError(
            f"config.json: sliding_window is {config['sliding_window']}; attention over a window is not computed. If "
            "the model was trained without one, set sliding_window to null"
        )


def count_pairs(heads: int, key: str) -> int:
    """Number of pairs in an even number of heads, which a config.json states under `key`.

    Raises:
        CheckpointError: the number of heads is odd.
    """
    if heads % 2:
        raise CheckpointError(f"{key} is {heads}: differential attention pairs its heads and needs an even number")
    return heads // 2


def is_a(value: object, types: tuple[type, ...]) -> bool:
    """Whether a value has one of the types; unlike in Python, bool does not count as int."""
    return isinstance(value, types) and (not isinstance(value, bool) or bool in types)


def not_valid(config: Mapping[str, Any]) -> str:
    """Start of a message about a setting that no configuration of its type has."""
    return f"config.json is not a valid {config.get('model_type')} configuration"
