"""The adapter class, the registry of adapters, and checks that several adapters share."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from diffquant.errors import CheckpointError
from diffquant.family.heads import HeadLayout
from diffquant.model.architecture import Architecture
from diffquant.model.blocks import Parameters, ParameterSpec, Shape


@dataclass(frozen=True)
class Adapter:
    """Translation of one source format's configuration, tensor names and row order.

    Attributes:
        architecture: architecture of the model, with the class that runs it.
        renames: parts of tensor names that differ: the checkpoint's part by the model's part.
        kv_repeats: number of times that each of the checkpoint's KV heads is repeated in the model.
        may_lack_norm_weight: whether older checkpoints of the format lack the per-pair norm's weight.
    """

    architecture: Architecture
    renames: Mapping[str, str] = field(default_factory=dict)
    kv_repeats: int = 1
    may_lack_norm_weight: bool = False

    def match_tensors(self, tensors: Collection[str]) -> "Adapter":
        """Return this adapter, or one without the per-pair norm's weight if the checkpoint's `tensors` lack it."""
        if not self.may_lack_norm_weight or any(name.endswith(".subln.weight") for name in tensors):
            return self
        spec = replace(self.architecture.diff_spec, post_norm="plain")
        return replace(self, architecture=replace(self.architecture, diff_spec=spec))

    def source_name(self, canonical: str) -> str:
        """Return the checkpoint's name of the parameter that the model names `canonical`."""
        for ours, theirs in self.renames.items():
            canonical = canonical.replace(ours, theirs)
        return canonical

    @cached_property
    def source_parameters(self) -> Parameters:
        """All tensors that the checkpoint must contain, by the checkpoint's names."""
        parameters: Parameters = {}
        for name, parameter in (self.architecture.parameters | self.architecture.unused_parameters).items():
            rows, *rest = parameter.shape
            shape = (rows // self._count_repeats(parameter), *rest)
            parameters[self.source_name(name)] = replace(parameter, shape=shape)
        return parameters

    def source_shapes(self) -> dict[str, Shape]:
        """Return the shapes of all tensors that the checkpoint must contain, by the checkpoint's names."""
        return {name: parameter.shape for name, parameter in self.source_parameters.items()}

    def row_order(self, canonical: str) -> Tensor | None:
        """Return, for each row of a parameter, its row index in the checkpoint, or None if the order is the same."""
        parameter, spec = self.architecture.parameters[canonical], self.architecture.diff_spec
        repeats = self._count_repeats(parameter)
        if repeats == 1:
            return None
        width = spec.head_dim if parameter.projection == "k_proj" else spec.value_dim
        heads = torch.arange(parameter.shape[0] // repeats).view(-1, width)
        return heads.repeat_interleave(repeats, 0).flatten()

    def layout_row_order(self, layout: HeadLayout, canonical: str) -> Tensor | None:
        """Return, for each row of a parameter with heads ordered as in `layout`, its row index in the checkpoint.

        None means that the order is the same.
        """
        repeated = self.row_order(canonical)
        projection = self.architecture.parameters[canonical].projection
        order = None if projection is None else self.architecture.diff_spec.layout.permutation_to(layout, projection)
        if order is None or repeated is None:
            return repeated if order is None else order
        return repeated[order]

    def _count_repeats(self, parameter: ParameterSpec) -> int:
        return self.kv_repeats if parameter.projection in ("k_proj", "v_proj") else 1


# Function that creates the adapter for a config.json.
Reader = Callable[[dict[str, Any]], Adapter]
READERS: dict[str, Reader] = {}
# Model types whose readers support sliding windows; for other types, a config.json with a window is refused.
WITH_WINDOWS: set[str] = set()


def register(model_type: str, *, supports_windows: bool = False) -> Callable[[Reader], Reader]:
    """Register a function as the reader of config.json files with a `model_type`.

    Args:
        supports_windows: whether the reader supports sliding windows. If not, configurations with a window are refused.

    Raises:
        ValueError: that type already has a reader.
    """

    def add(reader: Reader) -> Reader:
        if model_type in READERS:
            raise ValueError(f"model_type {model_type!r} has a reader already")
        READERS[model_type] = reader
        if supports_windows:
            WITH_WINDOWS.add(model_type)
        return reader

    return add


def refuse_windows(config: Mapping[str, Any]) -> None:
    """Refuse a sliding window, which would otherwise be ignored silently.

    Raises:
        CheckpointError: the configuration has a window that is not switched off.
    """
    # A configuration may state a window's size together with use_sliding_window = false.
    if config.get("sliding_window") is not None and config.get("use_sliding_window") is not False:
        raise CheckpointError(
            f"config.json: sliding_window is {config['sliding_window']}; windowed attention is not supported. If "
            "the model was trained without one, set sliding_window to null"
        )


def refuse_settings(config: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse settings that would otherwise be ignored silently.

    Args:
        neutral: values without effect, by setting.

    Raises:
        CheckpointError: a setting has another value.
    """
    stated = [f"{key} is {config[key]!r}" for key, values in neutral.items() if config.get(key) not in values]
    if stated:
        raise CheckpointError(
            f"config.json: {', '.join(stated)}, which is not supported; if the model does not use it, remove it"
        )


def count_pairs(heads: int, config_key: str) -> int:
    """Return the number of pairs for a number of heads; `config_key` is its key in config.json, for the message.

    Raises:
        CheckpointError: the number of heads is odd.
    """
    if heads % 2:
        raise CheckpointError(
            f"{config_key} is {heads}: differential attention pairs its heads and needs an even number"
        )
    return heads // 2


def has_type(value: object, types: tuple[type, ...]) -> bool:
    """Return whether a value has one of the types; unlike in Python, bool does not count as int."""
    return isinstance(value, types) and (not isinstance(value, bool) or bool in types)


def invalid_config_prefix(config: Mapping[str, Any]) -> str:
    """Return the beginning of an error message about an invalid setting in a config.json."""
    return f"config.json is not a valid {config.get('model_type')} configuration"
