"""A recipe's choice of rounding."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from diffquant.errors import UsageError
from diffquant.support.suggestion import did_you_mean

# What a rounding that compensates may be told, and the choices; the first is what it does by itself.
ROUNDING_OPTIONS = {"inputs": ("rounded", "unrounded"), "target": ("model", "layer"), "order": ("stored", "activation")}


@dataclass(frozen=True)
class RoundingSettings:
    """A recipe's choice of rounding: which rule finds the weights' codes and scales, and what that rule reads.

    Attributes:
        name: name of a registered rounding, see `quantization.roundings`; known names are checked with the checkpoint.
        text: text file that a rounding with `needs_text` reads, relative to the working directory; the prose that
            ships by default.
        tokens: number of tokens of the text that are read; the rule's own number by default.
        window: number of tokens that the model sees at once while it reads; the rule's own number by default.
        inputs: inputs that a layer's weights are rounded for: "rounded", those that it has once the layers before it
            are rounded, or "unrounded", those of the 16-bit model.
        target: output that a layer's weights are to keep: "model", the 16-bit model's, so that they also make up for
            what was lost before them (GPTAQ, arXiv 2504.02692), or "layer", the layer's own for the inputs it has.
        order: order in which a weight's columns are rounded: "stored", or "activation", those of the largest inputs
            first, with scales that are chosen before.
        seed: seed of the order in which windows are read by a rounding that draws one; 0 by default.
    """

    name: str = "nearest"
    text: Path | None = None
    tokens: int | None = None
    window: int | None = None
    inputs: str | None = None
    target: str | None = None
    order: str | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not isinstance(self.text, Path | None):
            raise UsageError(
                f"rounding: a name and the Path of a text are needed, got {self.name!r} and {self.text!r}; "
                "RoundingSettings.parse reads plain data"
            )
        for what, number in (("tokens", self.tokens), ("window", self.window)):
            if number is not None and (type(number) is not int or number < 2):
                raise UsageError(f"rounding: {what} must be a number of 2 or more, got {number!r}")
        if self.seed is not None and (type(self.seed) is not int or self.seed < 0):
            raise UsageError(f"rounding: seed must be a number of 0 or more, got {self.seed!r}")
        for what, choices in ROUNDING_OPTIONS.items():
            if (choice := getattr(self, what)) not in (None, *choices):
                raise UsageError(f"rounding: {what} must be {' or '.join(choices)}, got {choice!r}")
        if (self.inputs, self.target) == ("unrounded", "model"):
            raise UsageError(
                "rounding: on unrounded inputs a layer's output is the model's; leave out inputs, or target"
            )

    @classmethod
    def parse(cls, entry: "str | Mapping[str, Any]") -> "RoundingSettings":
        """Read a recipe's entry: a rounding's name, or a mapping with its name, text, tokens, window and options.

        Raises:
            UsageError: a key is unknown (the nearest known one is named), or a value has the wrong type.
        """
        if isinstance(entry, str):
            return cls(entry)
        known = [f.name for f in fields(cls)]
        if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
            raise UsageError(f"rounding must be a name or a mapping of {', '.join(known)}, got {entry!r}")
        unknown = [str(key) for key in entry if key not in known]
        if unknown:
            raise UsageError("; ".join(f"unknown rounding key {key!r}{did_you_mean(key, known)}" for key in unknown))
        text = entry.get("text")
        if text is not None and not isinstance(text, str):
            raise UsageError(f"rounding: text must be the name of a file, got {text!r}")
        return cls(**{**entry, "text": None if text is None else Path(text)})

    @property
    def options(self) -> dict[str, str | int]:
        """The options that are given, by name."""
        return {name: given for name in (*ROUNDING_OPTIONS, "seed") if (given := getattr(self, name)) is not None}

    @property
    def reads(self) -> bool:
        """Whether the recipe names a text, or says how much of it is read."""
        return (self.text, self.tokens, self.window) != (None, None, None)

    def to_plain(self) -> str | dict[str, Any]:
        """Plain data that `parse` reads: the name where nothing else is stated."""
        if not self.reads and not self.options:
            return self.name
        entries = {
            "name": self.name,
            "text": None if self.text is None else str(self.text),
            "tokens": self.tokens,
            "window": self.window,
            **self.options,
        }
        return {key: value for key, value in entries.items() if value is not None}


NEAREST = RoundingSettings()
