"""The rounding settings of a recipe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from diffquant.errors import UsageError
from diffquant.support.names import did_you_mean

# Options of roundings that compensate errors, with their choices, the default first.
ROUNDING_OPTIONS = {"inputs": ("rounded", "unrounded"), "target": ("model", "layer"), "order": ("stored", "activation")}


@dataclass(frozen=True)
class RoundingSettings:
    """A recipe's choice of rounding rule, and the rule's options.

    Attributes:
        name: name of a registered rounding, see `quantization.roundings`; checked when a checkpoint is opened.
        text: calibration data, for a rounding that reads any: one or more sources in the form that `read_calibration`
            accepts. Files are relative to the working directory. The bundled text by default.
        tokens: number of tokens to read; by default the rule decides.
        window: number of tokens in each sequence of calibration data; by default the rule decides.
        inputs: the layer inputs that weights are rounded for: "rounded" are computed with the earlier layers already
            quantized, "unrounded" are the 16-bit model's.
        target: the layer output to approximate: "model" is the 16-bit model's output, so that a layer also compensates
            errors of earlier layers (GPTAQ, arXiv 2504.02692). "layer" is the unquantized layer's output for the given
            inputs.
        order: order in which a weight's columns are rounded: "stored", or "activation" for the columns with the largest
            inputs first, after scales are chosen.
        seed: seed that shuffles rows of a JSONL file or dataset, and windows in `tuned`; 0 by default.
        samples: number of windows to read, instead of `tokens`.
        imatrix: file of llama.cpp's importance matrix, by which `mse` weighs the errors of input channels; relative to
            the working directory.
    """

    name: str = "nearest"
    text: Path | tuple[Path, ...] | None = None
    tokens: int | None = None
    window: int | None = None
    inputs: str | None = None
    target: str | None = None
    order: str | None = None
    seed: int | None = None
    samples: int | None = None
    imatrix: Path | None = None

    def __post_init__(self) -> None:
        several = self.text if isinstance(self.text, tuple) and self.text else (self.text,)
        if not isinstance(self.name, str) or not (self.text is None or all(isinstance(each, Path) for each in several)):
            raise UsageError(
                f"rounding: name must be a string, and text a Path or a tuple of Paths, got {self.name!r} and "
                f"{self.text!r}; to read plain data use RoundingSettings.parse"
            )
        if self.imatrix is not None and not isinstance(self.imatrix, Path):
            raise UsageError(f"rounding: imatrix must be the Path of a file, got {self.imatrix!r}")
        for what, number in (("tokens", self.tokens), ("window", self.window)):
            if number is not None and (type(number) is not int or number < 2):
                raise UsageError(f"rounding: {what} must be a whole number, 2 or more, got {number!r}")
        if self.samples is not None and (type(self.samples) is not int or self.samples < 1):
            raise UsageError(f"rounding: samples must be a whole number, 1 or more, got {self.samples!r}")
        if self.samples is not None and self.tokens is not None:
            raise UsageError("rounding: samples and tokens both set how much is read; give only one")
        if self.seed is not None and (type(self.seed) is not int or self.seed < 0):
            raise UsageError(f"rounding: seed must be a whole number, 0 or more, got {self.seed!r}")
        for what, choices in ROUNDING_OPTIONS.items():
            if (choice := getattr(self, what)) not in (None, *choices):
                raise UsageError(f"rounding: {what} must be {' or '.join(choices)}, got {choice!r}")
        if (self.inputs, self.target) == ("unrounded", "model"):
            raise UsageError("rounding: inputs 'unrounded' and target 'model' cannot be combined; leave out one")

    @classmethod
    def parse(cls, entry: "str | Mapping[str, Any]") -> "RoundingSettings":
        """Parse a recipe's `rounding` entry: a rounding's name, or a mapping with its name and options.

        Raises:
            UsageError: a key is unknown (the message suggests the nearest), or a value has the wrong type.
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
        several: list[Any] = text if isinstance(text, list) and text else [text]
        if text is not None and not all(isinstance(each, str) for each in several):
            raise UsageError(f"rounding: text must be the name of a file or dataset, or a list of names, got {text!r}")
        file = entry.get("imatrix")
        if not (file is None or isinstance(file, str)):
            raise UsageError(f"rounding: imatrix must be the name of a file, got {file!r}")
        return cls(
            **{**entry, "text": None if text is None else to_calibration_paths(several), "imatrix": file and Path(file)}
        )

    @property
    def options(self) -> dict[str, str | int]:
        """The given settings that do not select calibration data, by name."""
        named = {name: given for name in (*ROUNDING_OPTIONS, "seed") if (given := getattr(self, name)) is not None}
        return named if self.imatrix is None else named | {"imatrix": str(self.imatrix)}

    @property
    def calibration_settings(self) -> tuple[str, ...]:
        """Names of the given settings that select calibration data."""
        return tuple(name for name in ("text", "tokens", "samples", "window") if getattr(self, name) is not None)

    def to_plain(self) -> str | dict[str, Any]:
        """Return plain data for `parse`: only the name if nothing else is set."""
        if not self.calibration_settings and not self.options:
            return self.name
        entries = {
            "name": self.name,
            "text": [str(each) for each in self.text] if isinstance(self.text, tuple) else self.text and str(self.text),
            "tokens": self.tokens,
            "samples": self.samples,
            "window": self.window,
            **self.options,
        }
        return {key: value for key, value in entries.items() if value is not None}


def to_calibration_paths(sources: Sequence[Path | str]) -> Path | tuple[Path, ...] | None:
    """Return sources of calibration data in the form of `RoundingSettings.text`.

    This is a Path for one source, a tuple of Paths for several, or None if there is none.
    """
    several = tuple(map(Path, sources))
    return several if len(several) > 1 else next(iter(several), None)


NEAREST = RoundingSettings()
