"""A checkpoint that is open but not loaded: its config, its tensors' shapes, and their data when asked for."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffquant.formats.front_matter import read_front_matter


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's entry in a header.

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
        """A tensor's data, which must not be changed: a folder's is the mapped file itself."""

    @abstractmethod
    def read_rows(self, name: str, rows: slice | Tensor) -> Tensor:
        """Some rows of a tensor's data, as `read(name)[rows]` gives them without the memory of the others."""

    def matrix_rows(self, name: str, first: int, last: int) -> Tensor:
        """Rows of a matrix [out, in] or of experts [experts, out, in], whose rows stand one after another."""
        if len(self.tensors[name].shape) == 2:
            return self.read_rows(name, slice(first, last))
        # Of a mapped file no others are touched.
        return self.read(name).flatten(0, -2)[first:last]

    @abstractmethod
    def weight_files(self) -> list[Path]:
        """The files that hold tensors, in order."""

    @abstractmethod
    def write_side_files(self, folder: Path) -> None:
        """Put tokenizer, generation settings and chat template into `folder`."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer in the file of the weights, read once; None where it has files of its own."""
        return None

    @property
    def front_matter(self) -> dict[str, Any]:
        """Licence, language and origin in its model card, which a card made of it repeats."""
        return read_front_matter(self.path)

    def written_dtype(self, name: str) -> torch.dtype:
        """Dtype in which a verb writes a tensor that it does not pack: the one in which it is read."""
        return self.tensors[name].dtype

    @property
    def written_config(self) -> dict[str, Any]:
        """The content of config.json beside tensors in their written dtypes."""
        return self.config

    @property
    def rounded_as(self) -> str | None:
        """Kind of the codes that the matrices were rounded to before they came here, such as Q4_1; None if unknown."""
        entry = self.config.get("diffquant_config")
        kind = entry.get("rounded_as") if isinstance(entry, Mapping) else None
        return kind if isinstance(kind, str) else None

    @property
    def note(self) -> str:
        """A sentence on what its makers ask of engines and nothing here computes; "" if there is nothing."""
        return ""

    @property
    def rounded_before(self) -> str:
        """The codes that weights were rounded to, and what else their engines round; "" if that is not known."""
        kind, note = self.rounded_as, self.note
        return f"weights were rounded to {kind} before{f'; {note}' if note else ''}" if kind else ""

    @property
    def rounded_again(self) -> str:
        """A warning for people about weights that were rounded before they came here; "" if they were not."""
        before, ends = self.rounded_before, ";" if self.note else ":"
        return f"the source's {before}{ends} rounding them again adds to that error" if before else ""

    @property
    def name(self) -> str:
        place = self.path.resolve()
        # Hugging Face's cache has models--ORG--NAME/snapshots/COMMIT.
        if place.parent.name == "snapshots" and place.parents[1].name.startswith("models--"):
            return place.parents[1].name.split("--", 2)[-1]
        return place.stem if place.is_file() else place.name

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as they are read."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def stored_nbytes(self) -> int:
        """Bytes that all tensors take on disk."""
        return self.nbytes


class RenamedCheckpoint(Checkpoint):
    """A checkpoint with one tensor under another name.

    Args:
        stored: the checkpoint as it is stored.
        old, new: name of the tensor there, and the name that it has here.
    """

    def __init__(self, stored: Checkpoint, old: str, new: str) -> None:
        self.path, self.config, self._stored, self._old, self._new = stored.path, stored.config, stored, old, new
        self.tensors = {new if name == old else name: info for name, info in stored.tensors.items()}

    def read(self, name: str) -> Tensor:
        return self._stored.read(self._stored_name(name))

    def read_rows(self, name: str, rows: slice | Tensor) -> Tensor:
        return self._stored.read_rows(self._stored_name(name), rows)

    def matrix_rows(self, name: str, first: int, last: int) -> Tensor:
        return self._stored.matrix_rows(self._stored_name(name), first, last)

    def weight_files(self) -> list[Path]:
        return self._stored.weight_files()

    def write_side_files(self, folder: Path) -> None:
        self._stored.write_side_files(folder)

    def written_dtype(self, name: str) -> torch.dtype:
        return self._stored.written_dtype(self._stored_name(name))

    @property
    def written_config(self) -> dict[str, Any]:
        return self._stored.written_config

    @property
    def rounded_as(self) -> str | None:
        return self._stored.rounded_as

    @property
    def note(self) -> str:
        return self._stored.note

    @property
    def stored_nbytes(self) -> int:
        return self._stored.stored_nbytes

    def _stored_name(self, name: str) -> str:
        return self._old if name == self._new else name
