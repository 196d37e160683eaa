"""Calibrated ranges: the magnitudes that the largest code of a static scheme stands for.

`diffquant calibrate` writes them as a safetensors file. Layer N has `layers.N.k` [key heads, channels of a key],
`layers.N.v` [value heads, channels of a value] and `layers.N.logits` [query heads], with heads as DiffTransformer
orders them. Metadata records the checkpoint and the settings of the calibration. A range can be used at every bit
width: its scale is range / (2^(bits-1) - 1).
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from diffquant.checkpoints.source import Source
from diffquant.errors import CheckpointError, OutputExistsError, UsageError
from diffquant.recipe import Recipe
from diffquant.recipe.targets import LAYER_TARGETS
from diffquant.support.files import check_regular_file, write_atomically
from diffquant.support.names import first_few, option_name
from diffquant.support.outputs import check_output_file
from diffquant.support.plain_data import parse_json, plain_data_digest

# Files of version 1 had no digest, so damage could pass for a range.
_VERSION = "2"


@dataclass(frozen=True)
class Ranges:
    """Calibrated ranges of one model's activations: the magnitudes that the largest code stands for.

    Attributes:
        model: fingerprint of the checkpoint that was calibrated.
        settings: text, observer and tokens of the calibration.
        bits: bit width that they were clipped for, or None if they can be used at every width.
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
        """Check that the ranges were calibrated on this checkpoint and cover all its layers and heads.

        Args:
            origin: name of the file that the ranges are from, for the message.

        Raises:
            CheckpointError: they belong to another model, or do not have this model's layers and heads.
        """
        if self.model != source.fingerprint:
            raise CheckpointError(
                f"{origin}: calibrated on another model than {source.path}; run diffquant calibrate on this checkpoint"
            )
        _check_values(self.tensors, origin)
        _check_shapes(self.tensors, source, origin)

    def check_recipe(self, recipe: Recipe) -> None:
        """Check that there are ranges for all static schemes of a recipe.

        Raises:
            UsageError: a target was not calibrated, or was calibrated for another bit width.
        """
        for target in LAYER_TARGETS:
            static = [scheme for scheme in recipe.schemes_of(target) if scheme.sharing.is_static]
            if static and not any(name.endswith(f".{target}") for name in self.tensors):
                raise UsageError(f"{target} {static[0]}: these ranges do not include {target}; calibrate it too")
            wrong = [scheme for scheme in static if self.bits is not None and self.bits != scheme.bits]
            if wrong:
                raise UsageError(
                    f"{target} {wrong[0]}: these ranges were clipped for {self.bits} bits; calibrate with "
                    f"{option_name('bits', wrong[0].bits)}, or with observer absmax or percentile"
                )


def check_ranges_used(file: Path | str | None, recipes: Iterable[Recipe]) -> None:
    """Check that at least one recipe has a static scheme, if a file of ranges is given.

    Raises:
        UsageError: no recipe has a static scheme.
    """
    if file is not None and not any(recipe.is_static(target) for recipe in recipes for target in LAYER_TARGETS):
        raise UsageError(
            f"no static scheme uses the ranges in {file}: give one, such as {option_name('kv', '8:static')}"
        )


def is_own_ranges(path: Path) -> bool:
    """Return whether a file contains ranges that diffquant wrote."""
    try:
        check_regular_file(path)
        with safe_open(path, framework="pt") as file:
            return "diffquant" in (file.metadata() or {})
    except (OSError, SafetensorError):
        return False


def check_calibrated_output(path: Path, overwrite: bool, is_own: bool) -> None:
    """Check that a calibration result can be written to a path.

    Args:
        overwrite: whether an existing file that diffquant wrote may be replaced.
        is_own: whether diffquant wrote an existing file.

    Raises:
        OutputExistsError: the file exists and `overwrite` is false, or diffquant did not write it.
        UsageError: it is a folder, or its folder cannot be written.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file to write, such as {path / 'scales.safetensors'}")
    if path.exists() and not overwrite:
        raise OutputExistsError(f"{path} exists; choose another output or pass {option_name('overwrite', True)}")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"the folder {folder}, where {path.name} would be written, does not exist")
    check_output_file(path, is_own)


def write_ranges(path: Path, ranges: Ranges) -> None:
    """Write a file of ranges atomically."""
    metadata = {
        "diffquant": _VERSION,
        "model": ranges.model,
        "settings": json.dumps(ranges.settings),
        "bits": json.dumps(ranges.bits),
    }
    metadata["sha256"] = _file_digest(metadata, ranges)
    write_atomically(path, save(_contiguous(ranges.tensors), metadata))


def read_ranges(path: Path, source: Source) -> Ranges:
    """Read the ranges in a file, which must have been calibrated on this checkpoint.

    Raises:
        CheckpointError: the file cannot be read, or belongs to another model.
    """
    ranges = read_any_ranges(path)
    ranges.check_model(source, str(path))
    return ranges


def read_any_ranges(path: Path) -> Ranges:
    """Read the ranges in a file, whatever model they belong to.

    Raises:
        CheckpointError: the file cannot be read, or is not what diffquant calibrate wrote.
    """
    try:
        check_regular_file(path)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read ranges from {path}: {error}") from error
    if metadata.get("diffquant") != _VERSION:
        raise CheckpointError(f"{path} has no ranges in this version's format; make them with diffquant calibrate")
    try:
        settings, bits = parse_json(metadata["settings"]), parse_json(metadata["bits"])
        ranges = Ranges(metadata["model"], settings, bits, tensors)
        is_sound = metadata["sha256"] == _file_digest(metadata, ranges)
    except (ValueError, KeyError):
        is_sound = False
    if not is_sound:
        raise CheckpointError(f"{path} is damaged: its checksum differs; make it again with diffquant calibrate")
    _check_values(tensors, str(path))
    return ranges


def _file_digest(metadata: Mapping[str, str], ranges: Ranges) -> str:
    """Return the SHA-256 of a file's ranges and metadata."""
    said = {name: metadata[name] for name in ("diffquant", "model", "settings", "bits")}
    return plain_data_digest([said, ranges.digest])


def _check_values(tensors: Mapping[str, Tensor], origin: str) -> None:
    """Check that ranges are valid.

    Raises:
        CheckpointError: some are not float32, finite and above zero; the message names them.
    """
    wrong = [
        name
        for name, tensor in tensors.items()
        if tensor.dtype != torch.float32 or not bool((torch.isfinite(tensor) & (tensor > 0)).all())
    ]
    if wrong:
        raise CheckpointError(
            f"{origin}: ranges must be finite float32 above zero, and {first_few(wrong, ', ')} are not; run diffquant "
            "calibrate"
        )


def _check_shapes(tensors: Mapping[str, Tensor], source: Source, origin: str) -> None:
    """Check that each target that has ranges has them for every layer and head of a checkpoint.

    Raises:
        CheckpointError: some are missing, of another shape, or not of this checkpoint; the message names them.
    """
    architecture = source.architecture
    rows = next(iter(architecture.cached_shapes.values()))
    shape_of = {"k": rows.keys, "v": rows.values, "logits": (source.spec.query_heads,)}
    targets = {name.rpartition(".")[2] for name in tensors} & set(shape_of)
    expected = {
        f"layers.{n}.{target}": shape_of[target] for target in targets for n in architecture.target_layers[target]
    }
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = [
        f"{name} is {list(found[name]) if name in found else 'missing'}, expected {list(shape)}"
        for name, shape in expected.items()
        if found.get(name) != shape
    ] + [f"{name} does not belong to it" for name in found if name not in expected]
    if wrong:
        raise CheckpointError(
            f"{origin}: these are not the ranges of {source.path}: {first_few(wrong)}; run diffquant calibrate"
        )


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
