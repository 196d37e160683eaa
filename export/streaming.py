"""External data: tensors beside model.onnx in one file, written some rows at a time."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from onnx import TensorProto
from torch import Tensor

from diffquant.export.external import DATA_FILE
from diffquant.progress import Progress

# Mapped files are read in pages: a tensor that starts on one is used where it lies.
_PAGE = 4096
_BLOCK_BYTES = 1 << 24


# From first and last (exclusive) row to their data.
Rows = Callable[[int, int], Tensor]


@dataclass(frozen=True)
class Streamed:
    """A tensor whose data is made when it is written.

    Attributes:
        name: of the initializer.
        kind: its TensorProto data type.
        shape: rows first.
        row_bytes: stored bytes of a row.
        make: from first and last (exclusive) row to their data, whose bytes are what is stored.
    """

    name: str
    kind: int
    shape: tuple[int, ...]
    row_bytes: int
    make: Rows

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.row_bytes


def place(tensors: Sequence[Streamed]) -> tuple[dict[str, TensorProto], int]:
    """Where each tensor's data will lie: the initializers by name, and the file's size."""
    placed: dict[str, TensorProto] = {}
    end = 0
    for tensor in tensors:
        offset = -(-end // _PAGE) * _PAGE
        end = offset + tensor.nbytes
        placed[tensor.name] = _reference(tensor, offset)
    return placed, end


def write(path: Path, tensors: Sequence[Streamed], progress: Progress) -> None:
    """Write the data file; memory is a block of rows."""
    total = sum(tensor.nbytes for tensor in tensors)
    done = 0
    with path.open("wb") as stream:
        for tensor in tensors:
            stream.seek(-(-stream.tell() // _PAGE) * _PAGE)
            for first, last in _blocks(tensor):
                _put(stream, tensor, first, last)
                done += (last - first) * tensor.row_bytes
                progress(done, total, tensor.name)
        stream.flush()
        os.fsync(stream.fileno())


def _reference(tensor: Streamed, offset: int) -> TensorProto:
    proto = TensorProto(name=tensor.name, data_type=tensor.kind, dims=tensor.shape)
    proto.data_location = TensorProto.EXTERNAL
    for key, value in (("location", DATA_FILE), ("offset", offset), ("length", tensor.nbytes)):
        proto.external_data.add(key=key, value=str(value))
    return proto


def _blocks(tensor: Streamed) -> list[tuple[int, int]]:
    rows = tensor.shape[0]
    step = max(1, _BLOCK_BYTES // max(1, tensor.row_bytes))
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def _put(stream: BinaryIO, tensor: Streamed, first: int, last: int) -> None:
    data = tensor.make(first, last).contiguous().view(torch.uint8).numpy()
    stream.write(data.data)
