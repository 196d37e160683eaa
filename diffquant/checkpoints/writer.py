"""Writes a safetensors file whose data arrives in any order, since the header is known in advance."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from diffquant.checkpoints.reader import SAFETENSORS_DTYPES
from diffquant.support.files import PreallocatedFile

_DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True)
class OutputTensor:
    """Name, dtype and shape of a tensor to write."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class ShardFile:
    """A safetensors file that is being written; several threads may write to it at once.

    Source: the safetensors format, https://huggingface.co/docs/safetensors.
    """

    def __init__(self, path: Path, tensors: Sequence[OutputTensor]) -> None:
        header, offsets = make_shard_header(tensors)
        self._starts = {name: len(header) + offset for name, offset in offsets.items()}
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._file = PreallocatedFile(path, len(header) + sum(tensor.nbytes for tensor in tensors))
        try:
            self._file.put(memoryview(header), 0)
        except OSError:
            self._file.close()
            raise

    def write(self, name: str, data: Tensor, first_row: int = 0) -> None:
        """Write consecutive rows of a tensor.

        Args:
            name: name of the tensor.
            data: the rows; a tensor [experts, out, ...] may also be given as rows of [experts * out, ...].
            first_row: index of the first row, in the form in which `data` is given.

        Raises:
            TypeError: the rows do not have the tensor's dtype, so they could overwrite other data.
        """
        announced = self._tensors[name].dtype
        if data.dtype != announced:
            raise TypeError(f"{name} was announced as {announced} and is written as {data.dtype}")
        row_nbytes = data.nbytes // len(data) if first_row else 0
        self._file.put(_bytes_of(data), self._starts[name] + first_row * row_nbytes)

    def close(self) -> None:
        self._file.close()


def make_shard_header(tensors: Sequence[OutputTensor]) -> tuple[bytes, dict[str, int]]:
    """Return the header of a safetensors file, and the offset of each tensor's data after the header, in bytes."""
    offsets: dict[str, int] = {}
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    # Wide types first: every tensor is then aligned to its own type, as mapped reading needs.
    for tensor in sorted(tensors, key=lambda t: -t.dtype.itemsize):
        offsets[tensor.name] = end
        end += tensor.nbytes
        entries[tensor.name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offsets[tensor.name], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offsets


def _bytes_of(data: Tensor) -> memoryview:
    flat = data.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
