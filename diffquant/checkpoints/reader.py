"""A checkpoint that is open but not loaded: its config and recipe, its tensors' shapes, and their data on demand."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffquant.checkpoints.side_files import find_cached_name, read_front_matter
from diffquant.errors import CheckpointError, UsageError
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import Scheme
from diffquant.recipe.targets import LAYER_TARGETS, target_of
from diffquant.support.devices import DTYPES
from diffquant.support.installation import CONFIG_VERSION

# Data types by their names in the header of a safetensors file.
SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class TensorInfo:
    """What a checkpoint's header contains about a tensor.

    Attributes:
        dtype: data type of the tensor.
        shape: sizes of its axes.
        shard: name of the file that holds it.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    shard: str

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Checkpoint(ABC):
    """The config and the tensors of a checkpoint that is open.

    Attributes:
        path: folder, or GGUF file.
        config: content of config.json as plain data.
        tensors: dtype, shape and shard of every tensor, by name.
    """

    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Return a tensor's data, which must not be modified: for a folder it is a view of the mapped file."""

    def read_rows(self, name: str, rows: slice | Tensor) -> Tensor:
        """Return `read(name)[rows]` without loading the tensor's other rows."""
        return self.read(name)[rows]

    def read_matrix_rows(self, name: str, first: int, last: int) -> Tensor:
        """Read rows `first` to `last` (exclusive) of a matrix [out, in].

        Experts in one tensor [experts, out, in] are read as a matrix [experts * out, in].
        """
        if len(self.tensors[name].shape) == 2:
            return self.read_rows(name, slice(first, last))
        # Other rows of a mapped file are not touched.
        return self.read(name).flatten(0, -2)[first:last]

    def rename(self, old: str, new: str) -> None:
        """Give a tensor another name, under which it is then read."""
        self.tensors = {new if name == old else name: info for name, info in self.tensors.items()}

    @abstractmethod
    def weight_files(self) -> list[Path]:
        """List the files that hold tensors, in order."""

    @abstractmethod
    def write_side_files(self, folder: Path) -> None:
        """Copy tokenizer, generation settings and chat template into `folder`."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer in the weight file, read once, or None if it has separate files."""
        return None

    @property
    def front_matter(self) -> dict[str, Any]:
        """Entries of the model card's front matter that cards of derived models keep, such as the licence."""
        return read_front_matter(self.path)

    def output_dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which `quantize` and `convert` write a tensor unpacked; by default that of the tensor."""
        return self.tensors[name].dtype

    @property
    def output_config(self) -> dict[str, Any]:
        """The content of config.json for a copy whose tensors are in their `output_dtype`."""
        return self.config

    @property
    def earlier_format(self) -> str | None:
        """Format that the matrices were already quantized to, such as Q4_1, or None if unknown."""
        return self._read_note("rounded_as")

    @property
    def scaled_on(self) -> str | None:
        """How `convert` scaled the matrices, and on which texts, or None if it did not."""
        return self._read_note("scaled_on")

    def _read_note(self, key: str) -> str | None:
        """Return a text that diffquant recorded about this checkpoint."""
        entry = self.config.get("diffquant_config")
        text = entry.get(key) if isinstance(entry, Mapping) else None
        return text if isinstance(text, str) else None

    @property
    def engine_difference_note(self) -> str:
        """A clause on what other engines quantize in this model and diffquant does not; "" if there is nothing."""
        return ""

    @property
    def earlier_rounding_clause(self) -> str:
        """A clause on the weights' earlier format, with `engine_difference_note`; "" if they were not quantized."""
        kind, note = self.earlier_format, self.engine_difference_note
        return f"weights were rounded to {kind} before{f'; {note}' if note else ''}" if kind else ""

    @property
    def requantization_warning(self) -> str:
        """A warning that quantizing adds to the error of an earlier quantization; "" if there was none."""
        before, ends = self.earlier_rounding_clause, ";" if self.engine_difference_note else ":"
        return f"the source's {before}{ends} rounding them again adds to that error" if before else ""

    @property
    def name(self) -> str:
        if name := find_cached_name(self.path):
            return name.rpartition("/")[2]
        place = self.path.resolve()
        return place.stem if place.is_file() else place.name

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the dtypes in which they are read."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def stored_nbytes(self) -> int:
        """Bytes that all tensors take on disk."""
        return self.nbytes


def read_stored_recipe(config: Mapping[str, Any]) -> Recipe:
    """Read the recipe that a quantized checkpoint was made with; 16 bits for any other checkpoint.

    Raises:
        CheckpointError: it cannot be read, or a newer diffquant wrote it.
    """
    entry = config.get("diffquant_config", {})
    try:
        if entry.get("version", CONFIG_VERSION) > CONFIG_VERSION:
            raise CheckpointError(
                f"config.json: diffquant_config has version {entry['version']}, but this diffquant reads "
                f"{CONFIG_VERSION}; install a newer one"
            )
        return Recipe.from_dict(entry.get("recipe", {}))
    except (UsageError, AttributeError, TypeError) as error:
        raise CheckpointError(f"config.json: diffquant_config is malformed: {error}") from error


def merge_stored(recipe: Recipe, stored: Recipe) -> tuple[Recipe, tuple[str, ...]]:
    """Complete a recipe with the cache and logit schemes that a checkpoint already records.

    Args:
        stored: the checkpoint's recorded recipe.

    Returns:
        The recipe, with the stored scheme for each target that it does not quantize itself; and messages for the user
        about the stored schemes that are kept and those that are replaced.
    """
    carried: list[str] = []
    notes: list[str] = []
    for target in LAYER_TARGETS:
        old, new = _target_schemes(stored, target), _target_schemes(recipe, target)
        if old == _target_schemes(Recipe(), target) or old == new:
            continue
        if new == _target_schemes(Recipe(), target):
            scheme, overrides = old
            changes: dict[str, Any] = {target: scheme, "overrides": {**recipe.overrides, **overrides}}
            recipe = replace(recipe, **changes)
            carried.append(target)
        else:
            notes.append(f"{_text(recipe, target)} replaces the source's {_text(stored, target)}")
    residual = f"residual {stored.residual}"
    if stored.residual and not recipe.residual and {"k", "v"} & set(carried):
        recipe = replace(recipe, residual=stored.residual)
        carried.append(residual)
    elif stored.residual and stored.residual != recipe.residual:
        notes.append(f"residual {recipe.residual} replaces the source's {residual}")
    if carried:
        said = [_text(recipe, name) if name in LAYER_TARGETS else name for name in carried]
        notes.insert(
            0,
            f"the source's recipe is kept where this one has 16 bits: {', '.join(said)}; replace it with an override "
            f"such as '*.{carried[0]}=16'",
        )
    return recipe, tuple(notes)


def _target_schemes(recipe: Recipe, target: str) -> tuple[Scheme, dict[str, Scheme]]:
    """Return a target's scheme and its overrides by layer."""
    own = {pattern: scheme for pattern, scheme in recipe.overrides.items() if target_of(pattern) == target}
    return getattr(recipe, target), own


def _text(recipe: Recipe, target: str) -> str:
    scheme, overrides = _target_schemes(recipe, target)
    return ", ".join([f"{target} {scheme}", *(f"{pattern} {own}" for pattern, own in overrides.items())])


def read_recorded_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """Return the model dtype that a quantized checkpoint records, or None if it records none.

    Without a recorded dtype, the model has the dtype of the checkpoint's tensors.

    Raises:
        CheckpointError: models cannot run in the recorded dtype.
    """
    entry = config.get("diffquant_config")
    name = entry.get("dtype") if isinstance(entry, Mapping) else None
    if name is not None and (not isinstance(name, str) or name not in DTYPES):
        raise CheckpointError(f"config.json: diffquant_config has dtype {name!r}; choose from {', '.join(DTYPES)}")
    return None if name is None else DTYPES[name]
