"""Settings of a training run as its YAML file has them, checked."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from diffquant.errors import UsageError
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import Scheme


@dataclass(frozen=True)
class Sizes:
    """Sizes of the Transformer, to which the DIFF models are matched.

    Attributes:
        heads: number of the Transformer's heads, each `head_dim` wide; V1 has half as many pairs, V2 as many.
        context: number of positions the model is told of.
        init: standard deviation of the initial weights.
        bias: whether attention's projections have biases.
        theta: base of the rotary embedding.
        look_back: whether two maps start out reading one and two tokens back, which needs `bias`.
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
    """Schedule of a training: how long, how fast, on how much.

    Attributes:
        steps: number of optimizer steps.
        warmup: number of steps of linear warm-up; linear decay to `final` of the peak follows.
        tokens: tokens of one micro-batch.
        accumulate: number of micro-batches in a step.
        lengths: tokens of a sequence by share of the run, such as [[0, 64], [0.3, 256]].
        rate: peak learning rate.
        decay: weight decay of matrices.
        clip: largest gradient norm.
        seed: seed of weights and data.
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

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(length for _, length in self.lengths)

    def length(self, step: int) -> int:
        """Tokens of a sequence at a step."""
        return max((start, length) for start, length in self.lengths if start <= step / self.steps)[1]

    def learning_rate(self, step: int) -> float:
        """Learning rate at a step: linear warm-up, then linear decay to `final` of the peak at the last step."""
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        left = (self.steps - step - 1) / max(1, self.steps - self.warmup - 1)
        return self.rate * (self.final + (1 - self.final) * left)


@dataclass(frozen=True)
class Settings:
    """Settings of `train.py`.

    Attributes:
        source: name of the training data, "needle" or "prose".
        model: sizes of the model.
        schedule: schedule of the training.
        data: arguments of the training data beside the text.
    """

    source: str
    model: Sizes
    schedule: Schedule
    data: dict[str, Any]

    @classmethod
    def read(cls, path: Path, steps: int | None = None, seed: int | None = None) -> "Settings":
        """Settings that a YAML file holds.

        Args:
            steps, seed: values in place of the file's.

        Raises:
            UsageError: the file cannot be read, or a key is unknown or missing.
        """
        entries = _entries(path)
        if not isinstance(entries, dict) or set(entries) != {"source", "model", "schedule", "data"}:
            raise UsageError(f"{path} must hold source, model, schedule and data, nothing else")
        if steps is not None and steps < 1:
            raise UsageError(f"{steps} steps train nothing; give 1 or more")
        overrides = {"steps": steps, "seed": seed}
        schedule = entries["schedule"] | {key: value for key, value in overrides.items() if value is not None}
        return cls(
            entries["source"],
            _build(Sizes, entries["model"], path),
            _build(Schedule, schedule, path),
            entries["data"] or {},
        )


@dataclass(frozen=True)
class PairsSettings:
    """Settings of `pairs.py`.

    Attributes:
        schedule: schedule of every model; 0 steps stand for as many as there is time for.
        perturbation: size of the noise on the second maps' queries, in standard deviations of the query weights.
        distil: share, by kind, of the steps whose loss is KL from the base.
        delta: scheme of the stored differences.
        heldout: number of characters at the text's end that are measured and never trained on.
        calibration: number of tokens of the text on which V1's start is balanced.
        every: number of steps between checkpoints, and between lines of the log.
    """

    schedule: Schedule
    perturbation: float
    distil: dict[str, float]
    delta: str
    heldout: int
    calibration: int
    every: int

    @property
    def scheme(self) -> Scheme:
        """Scheme that `delta` names.

        Raises:
            UsageError: `delta` names none that packs weights.
        """
        scheme = Recipe.of(weights=self.delta).weights
        if not scheme.quantizes:
            raise UsageError(f"delta {self.delta}: differences are stored in 2 to 8 bits, such as 4:g32")
        return scheme

    @classmethod
    def read(cls, path: Path) -> "PairsSettings":
        """Settings that a YAML file holds.

        Raises:
            UsageError: the file cannot be read, or a key is unknown or missing.
        """
        entries = _entries(path)
        if not isinstance(entries, dict) or not isinstance(entries.get("schedule"), dict):
            raise UsageError(f"{path} must hold settings by name, a schedule among them")
        schedule = _build(Schedule, {"steps": 0} | entries["schedule"], path)
        settings: PairsSettings = _build(cls, entries | {"schedule": schedule}, path)
        return settings


def _entries(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"cannot read settings {path}: {error}") from error


def _build(kind: type, entries: dict[str, Any], path: Path) -> Any:
    unknown = sorted(set(entries) - {f.name for f in fields(kind)})
    if unknown:
        raise UsageError(f"{path}: unknown keys {', '.join(unknown)} of {kind.__name__.lower()}")
    try:
        return kind(**{k: tuple(map(tuple, v)) if k == "lengths" else v for k, v in entries.items()})
    except TypeError as error:
        raise UsageError(f"{path}: {kind.__name__.lower()}: {error}") from error
