"""A training run as its YAML file says it, checked."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from diffquant.errors import UsageError


@dataclass(frozen=True)
class Sizes:
    """The Transformer's sizes; the DIFF models are matched to them.

    Attributes:
        heads: of the Transformer, each `head_dim` wide; V1 has half as many pairs, V2 as many.
        context: positions the model is told of.
        init: standard deviation of the initial weights.
        bias: whether attention's projections have biases.
        theta: base of the rotary embedding.
        look_back: start with maps that read the one and two tokens before, which needs `bias`.
    """

    hidden: int
    layers: int
    heads: int
    head_dim: int
    inner: int
    context: int
    init: float
    bias: bool
    theta: float
    look_back: bool = False


@dataclass(frozen=True)
class Schedule:
    """How long, how fast, on how much.

    Attributes:
        steps: optimizer steps.
        warmup: steps of linear warm-up; linear decay to `final` of the peak follows.
        tokens: of one micro-batch.
        accumulate: micro-batches a step.
        lengths: tokens of a sequence by share of the run, such as [[0, 64], [0.3, 256]].
        rate: peak learning rate.
        decay: weight decay of matrices.
        clip: largest gradient norm.
        seed: of weights and data.
    """

    steps: int
    warmup: int
    tokens: int
    lengths: tuple[tuple[float, int], ...]
    rate: float
    final: float = 0.04
    accumulate: int = 1
    decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    seed: int = 0

    def length(self, step: int) -> int:
        """Tokens of a sequence at a step."""
        return max((start, length) for start, length in self.lengths if start <= step / self.steps)[1]

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then linear decay to `final` of the peak at the last step."""
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        left = (self.steps - step - 1) / max(1, self.steps - self.warmup - 1)
        return self.rate * (self.final + (1 - self.final) * left)


@dataclass(frozen=True)
class Settings:
    """`data` holds what the named source takes beside the text."""

    source: str
    model: Sizes
    schedule: Schedule
    data: dict[str, Any]

    @classmethod
    def read(cls, path: Path, steps: int | None = None, seed: int | None = None) -> "Settings":
        """
        Args:
            steps: instead of the file's, as is `seed`.

        Raises:
            UsageError: the file cannot be read, or a key is unknown or missing.
        """
        try:
            entries = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UsageError(f"cannot read settings {path}: {error}") from error
        if not isinstance(entries, dict) or set(entries) != {"source", "model", "schedule", "data"}:
            raise UsageError(f"{path} must hold source, model, schedule and data, nothing else")
        given = {"steps": steps, "seed": seed}
        schedule = entries["schedule"] | {key: value for key, value in given.items() if value is not None}
        return cls(
            entries["source"],
            _build(Sizes, entries["model"], path),
            _build(Schedule, schedule, path),
            entries["data"] or {},
        )


def _build(kind: type, entries: dict[str, Any], path: Path) -> Any:
    unknown = sorted(set(entries) - {f.name for f in fields(kind)})
    if unknown:
        raise UsageError(f"{path}: unknown keys {', '.join(unknown)} of {kind.__name__.lower()}")
    try:
        return kind(**{k: tuple(map(tuple, v)) if k == "lengths" else v for k, v in entries.items()})
    except TypeError as error:
        raise UsageError(f"{path}: {kind.__name__.lower()}: {error}") from error
