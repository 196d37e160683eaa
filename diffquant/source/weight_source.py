"""`WeightSource`: a checkpoint of any architecture, of which only tensors' names and shapes are known."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from diffquant.errors import UsageError
from diffquant.formats.compressed_config import read_schemes
from diffquant.formats.compressed_tensors import packed_modules
from diffquant.formats.opening import open_checkpoint
from diffquant.formats.reader import Checkpoint, TensorInfo
from diffquant.scheme import Scheme
from diffquant.source.weight_rules import WeightRules, matches
from diffquant.support.listing import NAMED, first_few

# In narrower matrices, such as the coefficients of each expert's activation, scales cost what codes save.
_NARROWEST = 32


@dataclass(frozen=True, eq=False)
class WeightSource:
    """A checkpoint of any architecture.

    Attributes:
        checkpoint: reader of its config and tensors.
        rules: rules that choose its weights.
        packed: scheme of each module whose weight is stored packed; empty for a plain checkpoint.
    """

    checkpoint: Checkpoint
    rules: WeightRules
    packed: Mapping[str, Scheme]

    @property
    def path(self) -> Path:
        return self.checkpoint.path

    @property
    def model_type(self) -> str | None:
        """The `model_type` of config.json, for information only."""
        return self.checkpoint.config.get("model_type")

    @cached_property
    def weights(self) -> dict[str, str]:
        """Name of the tensor of each module whose weight could be packed, kept ones included."""
        names = [
            name
            for name, info in self.checkpoint.tensors.items()
            if self.rules.mean(name, len(info.shape)) and info.shape[-1] >= _NARROWEST and info.shape[0]
        ]
        return {name.removesuffix(".weight"): name for name in names}

    @cached_property
    def linears(self) -> list[str]:
        """Modules whose weights the rules choose."""
        return [module for module, name in self.weights.items() if not matches(name, self.rules.keep)]

    def matrices(self) -> list[str]:
        """Every module that may be a Linear, narrow ones included."""
        tensors = self.checkpoint.tensors.items()
        return [name.removesuffix(".weight") for name, info in tensors if _is_matrix(name, info)]


def open_weights(path: Path | str | WeightSource, rules: WeightRules | None = None) -> WeightSource:
    """Open a checkpoint of any architecture to work on its weights.

    Args:
        path: a folder of safetensors; an open source is returned as it is.
        rules: rules that choose the weights; by default those that ship with diffquant.

    Raises:
        CheckpointError: the checkpoint is damaged or incomplete.
        UsageError: one of the caller's patterns to keep matches no tensor.
    """
    if isinstance(path, WeightSource):
        return path
    checkpoint = open_checkpoint(Path(path))
    rules = rules or WeightRules.read()
    _check_keep(rules, checkpoint)
    return WeightSource(checkpoint, rules, read_schemes(checkpoint.config, packed_modules(checkpoint.tensors)))


def _check_keep(rules: WeightRules, checkpoint: Checkpoint) -> None:
    shipped = WeightRules.read().keep
    unmatched = [
        pattern
        for pattern in rules.keep
        if pattern not in shipped and not any(matches(name, (pattern,)) for name in checkpoint.tensors)
    ]
    if unmatched:
        # Finding the nearest name takes long, and only the first few are shown.
        problems = [f"{each!r} (the nearest is {_nearest(each, checkpoint)!r})" for each in unmatched[:NAMED]]
        listed = first_few([*problems, *unmatched[NAMED:]], ", ")
        raise UsageError(f"patterns to keep match no tensor of {checkpoint.path}: {listed}")


def _nearest(pattern: str, checkpoint: Checkpoint) -> str:
    names = difflib.get_close_matches(pattern.replace("*", ""), checkpoint.tensors, n=1, cutoff=0.0)
    return names[0] if names else ""


def _is_matrix(name: str, info: TensorInfo) -> bool:
    return name.endswith(".weight") and len(info.shape) == 2 and info.dtype.is_floating_point
