"""External data: one file next to model.onnx with all large tensors, written a few rows at a time."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from onnx import TensorProto
from torch import Tensor

from diffquant.checkpoints.row_stream import map_in_order, open_workers, row_blocks
from diffquant.support.files import PreallocatedFile
from diffquant.support.progress import Progress

# A tensor that starts on a page boundary can be used from a memory-mapped file without a copy.
_PAGE = 4096

# Returns the data of rows, given the first and the last (exclusive) row.
Rows = Callable[[int, int], Tensor]


@dataclass(frozen=True)
class StreamedTensor:
    """A tensor whose data is computed while it is written.

    Attributes:
        name: name of the initializer.
        kind: TensorProto data type.
        shape: shape in the model, rows first.
        row_bytes: stored bytes of a row.
        width: number of elements of a row in the checkpoint.
        make: function that returns the data of the rows `first` to `last` - 1, given these two.
        follows: whether the data is stored directly after the preceding tensor's, so that both can be read as one.
    """

    name: str
    kind: int
    shape: tuple[int, ...]
    row_bytes: int
    width: int
    make: Rows
    follows: bool = False

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.row_bytes


def assign_offsets(tensors: Sequence[StreamedTensor], data_name: str) -> tuple[dict[str, TensorProto], int]:
    """Assign tensors to offsets in the data file; return their initializers by name, and the file's size in bytes."""
    placed: dict[str, TensorProto] = {}
    end = 0
    for tensor in tensors:
        offset = end if tensor.follows else -(-end // _PAGE) * _PAGE
        end = offset + tensor.nbytes
        placed[tensor.name] = _reference(tensor, offset, data_name)
    return placed, end


def write_data_file(
    path: Path, tensors: Sequence[StreamedTensor], placed: Mapping[str, TensorProto], size: int, progress: Progress
) -> None:
    """Write the tensors to the data file, with a few blocks of rows per core in memory at a time.

    Args:
        placed, size: result of `assign_offsets`.
    """
    offsets = {name: _entry(proto, "offset") for name, proto in placed.items()}
    total = sum(tensor.nbytes for tensor in tensors)
    done = 0
    with closing(PreallocatedFile(path, size)) as file, open_workers() as pool:

        def work(tensor: StreamedTensor, first: int, last: int) -> tuple[str, int]:
            data = tensor.make(first, last).contiguous().view(torch.uint8).numpy()
            file.put(data.data.cast("B"), offsets[tensor.name] + first * tensor.row_bytes)
            return tensor.name, data.nbytes

        tasks = (
            (tensor, first, last) for tensor in tensors for first, last in row_blocks(tensor.shape[0], tensor.width)
        )
        for name, written in map_in_order(pool, work, tasks):
            done += written
            progress(done, total, name)
        file.sync()


def _reference(tensor: StreamedTensor, offset: int, data_name: str) -> TensorProto:
    proto = TensorProto(name=tensor.name, data_type=tensor.kind, dims=tensor.shape)
    proto.data_location = TensorProto.EXTERNAL
    for key, value in (("location", data_name), ("offset", offset), ("length", tensor.nbytes)):
        proto.external_data.add(key=key, value=str(value))
    return proto


def make_view(tensors: Sequence[TensorProto], name: str, shape: Sequence[int]) -> TensorProto:
    """Return an initializer whose bytes are those of consecutive tensors in the data file.

    Args:
        tensors: initializers of the tensors, which are stored without gaps.
        name: name of the new initializer.
        shape: shape of the new initializer.
    """
    other = TensorProto()
    other.CopyFrom(tensors[0])
    other.name = name
    del other.dims[:]
    other.dims.extend(shape)
    for entry in other.external_data:
        if entry.key == "length":
            entry.value = str(sum(_entry(tensor, "length") for tensor in tensors))
    return other


def _entry(proto: TensorProto, key: str) -> int:
    return next(int(entry.value) for entry in proto.external_data if entry.key == key)
