"""Calibrated ranges: the magnitudes that the largest code stands for where a scheme is static.

`diffquant calibrate` writes them as a safetensors file: `layers.N.k` [key heads, d], `layers.N.v` [h_kv, dv] and
`layers.N.logits` [maps·h], heads as DiffTransformer orders them, with the checkpoint and the settings that they come
from as metadata. A range serves codes of every width: its scale is range / (2^(bits-1) - 1).
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from diffquant.errors import CheckpointError, OutputExistsError, UsageError
from diffquant.recipe import LAYER_TARGETS, Recipe
from diffquant.source.source import Source
from diffquant.support.files import check_writable, write_atomically

_VERSION = "1"


@dataclass(frozen=True)
class Ranges:
    """Ranges of one model's activations.

    Attributes:
        model: fingerprint of the checkpoint that was calibrated.
        settings: text, observer and tokens of the calibration.
        bits: width that they were clipped for; None where they serve every width.
        tensors: float32 ranges by name.
    """

    model: str
    settings: Mapping[str, Any]
    bits: int | None
    tensors: Mapping[str, Tensor]

    @property
    def digest(self) -> str:
        """SHA-256 over the ranges' names, shapes and values."""
        return hashlib.sha256(save(_contiguous(self.tensors))).hexdigest()

    def check_model(self, source: Source, origin: str = "these ranges") -> None:
        """Check that the ranges were calibrated on this very checkpoint.

        Args:
            origin: where the ranges come from, for the message.

        Raises:
            CheckpointError: they belong to another model.
        """
        if self.model != source.fingerprint:
            raise CheckpointError(
                f"{origin}: calibrated on another model than {source.path}; run diffquant calibrate on this checkpoint"
            )

    def check(self, recipe: Recipe) -> None:
        """Check that a recipe's static schemes find their ranges here.

        Raises:
            UsageError: a target was not calibrated, or was for another width.
        """
        for target in LAYER_TARGETS:
            static = [scheme for scheme in recipe.schemes_of(target) if scheme.granularity == "static"]
            if static and f"layers.0.{target}" not in self.tensors:
                raise UsageError(f"{target} {static[0]}: these ranges hold none of {target}; calibrate it too")
            wrong = [scheme for scheme in static if self.bits not in (None, scheme.bits)]
            if wrong:
                raise UsageError(
                    f"{target} {wrong[0]}: these ranges were clipped for {self.bits} bits; calibrate with "
                    f"--bits {wrong[0].bits}, or with an observer that serves every width"
                )


def check_ranges_used(file: Path | str | None, recipes: Iterable[Recipe]) -> None:
    """Check that a file of ranges, if there is one, serves some recipe.

    Raises:
        UsageError: no recipe has a static scheme.
    """
    if file is not None and not any(recipe.is_static(target) for recipe in recipes for target in LAYER_TARGETS):
        raise UsageError(f"nothing takes the ranges in {file}: give a static scheme, such as --kv 8:static")


def check_ranges_output(path: Path, overwrite: bool) -> None:
    """Check that a file of ranges can be written at a path.

    Raises:
        OutputExistsError: the file is there and `overwrite` is false.
        UsageError: it is a folder, or nothing can be written beside it.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file to write, such as {path / 'scales.safetensors'}")
    if path.exists() and not overwrite:
        raise OutputExistsError(f"{path} exists; choose another output or pass --overwrite")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder} to write {path.name} into")
    check_writable(folder)


def write_ranges(path: Path, ranges: Ranges) -> None:
    """Write a file of ranges, whole or not at all."""
    metadata = {
        "diffquant": _VERSION,
        "model": ranges.model,
        "settings": json.dumps(ranges.settings),
        "bits": json.dumps(ranges.bits),
    }
    write_atomically(path, save(_contiguous(ranges.tensors), metadata))


def read_ranges(path: Path, source: Source) -> Ranges:
    """The ranges in a file, which must have been calibrated on this very checkpoint.

    Raises:
        CheckpointError: the file cannot be read, or belongs to another model.
    """
    ranges = read_any_ranges(path)
    ranges.check_model(source, str(path))
    return ranges


def read_any_ranges(path: Path) -> Ranges:
    """The ranges in a file, whichever model was calibrated.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Older files hold ranges of hidden states too, which no scheme takes.
            names = [name for name in file.keys() if name.rpartition(".")[2] in LAYER_TARGETS]  # noqa: SIM118
            tensors = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read ranges from {path}: {error}") from error
    if metadata.get("diffquant") != _VERSION:
        raise CheckpointError(f"{path} holds no ranges that this diffquant reads; make them with diffquant calibrate")
    return Ranges(metadata["model"], json.loads(metadata["settings"]), json.loads(metadata["bits"]), tensors)


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
