"""llama.cpp's importance matrix: the mean squared activations of each input channel of a model's weights.

A GGUF file has `NAME.in_sum2` (sums of squares) and `NAME.counts` for each weight; the older binary file has sums and
the number of sequences that they are divided by. Weights have a GGUF file's names, or the checkpoint's own.

Source: llama.cpp, tools/imatrix/imatrix.cpp.
"""

import logging
import struct
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFType, GGUFWriter, Keys
from torch import Tensor

from diffquant.checkpoints.gguf import OWN_KEY, map_file, to_gguf_name
from diffquant.checkpoints.gguf_header import StoredTensor, read_header
from diffquant.checkpoints.side_files import is_lfs_pointer
from diffquant.errors import CheckpointError
from diffquant.support.devices import log_once
from diffquant.support.digests import content_digest
from diffquant.support.files import check_regular_file, replace_atomically
from diffquant.support.installation import versions
from diffquant.support.names import find_duplicates, first_few, option_name
from diffquant.support.terminal import PrintableResult, one_line

_SUMS, _COUNTS = ".in_sum2", ".counts"
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_Floats = np.ndarray[Any, np.dtype[np.float32]]
# A weight's sums of squares, and the counts that they are divided by: one, or one for each of its experts.
_Entry = tuple[_Floats, _Floats]


@dataclass(frozen=True, eq=False, repr=False)
class Imatrix(PrintableResult):
    """An importance matrix, read from a file.

    Attributes:
        path: the file.
        means: mean squares [in] of each weight's inputs, by the weight's name in the file; for experts in one tensor,
            [experts · in].
        datasets: names of the calibration data.
        chunks: number of sequences that were read; 0 if the file does not record it.
        digest: digest of the file's content.
    """

    path: Path
    means: Mapping[str, Tensor]
    datasets: tuple[str, ...]
    chunks: int
    digest: str

    def summary(self) -> str:
        data = ", ".join(map(one_line, self.datasets)) or "unknown data"
        file = one_line(str(self.path))
        return f"{file}: importance of the inputs of {len(self.means)} weights, over {self.chunks} windows of {data}"

    def to_dict(self) -> dict[str, Any]:
        """Return what diffquant.json records about the file."""
        return {"file": self.path.name, "digest": self.digest, "datasets": list(self.datasets), "chunks": self.chunks}

    def importance(self, input_counts: Mapping[str, int], tensors: Collection[str]) -> dict[str, Tensor]:
        """Return the importance [in] of each weight's input channels in float32, with a mean of 1.

        Args:
            input_counts: number of input channels of each weight that is rounded, by its name in the checkpoint.
            tensors: names of all tensors of the checkpoint; other entries of the matrix are ignored, with a warning.

        Raises:
            CheckpointError: weights have no entry, or one with another number of channels; the message names the
                first.
        """
        entries = {
            name: next((n for n in (name, to_gguf_name(name)) if n in self.means), None) for name in input_counts
        }
        missing = [name for name, entry in entries.items() if entry is None]
        if missing:
            raise CheckpointError(
                f"{self.path} has no activations for {len(missing)} of {len(input_counts)} weights: "
                f"{first_few(missing, ', ')}; use an imatrix of this model, or keep them at 16 bits with "
                f"{option_name('overrides', 'PATTERN=16')}"
            )
        found = {name: self.means[entry] for name, entry in entries.items() if entry is not None}
        misfits = [
            f"{entries[name]} has {len(means)} values, and {name} has {input_counts[name]} input channels"
            for name, means in found.items()
            if len(means) != input_counts[name]
        ]
        if misfits:
            raise CheckpointError(f"{self.path} is not an imatrix of this model: {first_few(misfits)}")
        known = {each for name in tensors for each in (name, to_gguf_name(name))}
        if surplus := [one_line(name) for name in self.means if name not in known]:
            message = "%s has entries for %d tensors that this model does not have, which are ignored: %s"
            log_once(__name__, logging.WARNING, message, self.path, len(surplus), first_few(surplus, ", "))
        return {name: _relative(means) for name, means in found.items()}


def _relative(means: Tensor) -> Tensor:
    """Divide by the mean, so that products with small or large squares stay within float32."""
    values = means.double()
    return (values / values.mean().clamp(min=torch.finfo(torch.float64).tiny)).float()


def read_imatrix(path: Path) -> Imatrix:
    """Read an importance matrix in llama.cpp's GGUF or older binary format.

    Raises:
        CheckpointError: the file cannot be read, is not an importance matrix, is cut off, or has entries with negative
            or non-finite values; the message names the first.
    """
    try:
        check_regular_file(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    data = map_file(path)
    try:
        is_gguf = bytes(data[:4]) == b"GGUF" or is_lfs_pointer(data.data)
        entries, datasets, chunks = _read_gguf(data) if is_gguf else _read_binary(data.data)
        means = _means(entries)
    except CheckpointError as error:
        raise CheckpointError(f"cannot read {path} as an imatrix: {error}") from error
    return Imatrix(path, means, datasets, chunks, content_digest(path))


def _means(entries: Mapping[str, _Entry]) -> dict[str, Tensor]:
    """Return the mean squares of each entry, without those whose weight was never used.

    Raises:
        CheckpointError: a sum or count is negative or not finite, a count is no number of tokens, or counts do not
            divide the values.
    """
    wrong = []
    for name, (sums, counts) in entries.items():
        if not all(np.isfinite(each).all() and (each >= 0).all() for each in (sums, counts)):
            wrong.append(f"{one_line(name)} has negative or non-finite values")
        elif ((counts > 0) & (counts < 1)).any():
            wrong.append(f"{one_line(name)} has a count of tokens between 0 and 1")
        elif not counts.size or not sums.size or sums.size % counts.size:
            wrong.append(f"{one_line(name)} has {sums.size} values and {counts.size} counts")
    if wrong:
        raise CheckpointError(first_few(wrong))
    return {name: _mean(*entry) for name, entry in entries.items() if entry[1].any()}


def _mean(sums: _Floats, counts: _Floats) -> Tensor:
    """Divide sums of one or several experts by their counts; an expert without tokens gets 1, as in llama.cpp."""
    by_expert = sums.reshape(len(counts), -1) / np.where(counts > 0, counts, 1)[:, None]
    return torch.from_numpy(np.where(counts[:, None] > 0, by_expert, 1).astype(np.float32).ravel())


def _read_gguf(data: _Bytes) -> tuple[dict[str, _Entry], tuple[str, ...], int]:
    metadata, tensors, _ = read_header(data.data)
    if (kind := metadata.get(Keys.General.TYPE)) != GGUFType.IMATRIX:
        raise CheckpointError(f"it is a GGUF file with general.type {kind!r:.40}, not 'imatrix'")
    # Values are copied, and a small file could name the same bytes again and again.
    if sum(stored.nbytes for stored in tensors.values()) > len(data):
        raise CheckpointError("its tensors overlap")
    parts = (_SUMS, _COUNTS)
    names = dict.fromkeys(name.removesuffix(part) for name in tensors for part in parts if name.endswith(part))
    unpaired = [one_line(name) for name in names if not all(name + part in tensors for part in parts)]
    if unpaired:
        raise CheckpointError(f"{_SUMS} or {_COUNTS} is missing for {first_few(unpaired, ', ')}")
    if not names:
        raise CheckpointError(f"it has no tensor NAME{_SUMS}")
    entries = {name: (_values(data, name + _SUMS, tensors), _values(data, name + _COUNTS, tensors)) for name in names}
    datasets, chunks = metadata.get(Keys.IMatrix.DATASETS), metadata.get(Keys.IMatrix.CHUNK_COUNT)
    texts = tuple(map(str, datasets)) if isinstance(datasets, tuple) else ()
    return entries, texts, chunks if isinstance(chunks, int) else 0


def _values(data: _Bytes, name: str, tensors: Mapping[str, StoredTensor]) -> _Floats:
    stored = tensors[name]
    if stored.kind != GGMLQuantizationType.F32:
        raise CheckpointError(f"{one_line(name)} is {stored.kind.name}, not F32")
    return np.frombuffer(data[stored.start : stored.start + stored.nbytes].tobytes(), "<f4")


def _read_binary(data: memoryview) -> tuple[dict[str, _Entry], tuple[str, ...], int]:
    """Read the older format: little-endian int32 numbers, texts after their length, and float32 values.

    It has the number of entries; for each a name, the number of sequences, the number of values and the values; and at
    the end, in newer files, the number of sequences and the data's name.
    """
    entries: list[tuple[str, _Entry]] = []
    offset = 0

    def number(what: str, least: int) -> int:
        nonlocal offset
        if offset + 4 > len(data):
            raise CheckpointError(f"it is cut off at byte {offset} of {len(data)}, before {what}")
        value: int = struct.unpack_from("<i", data, offset)[0]
        if value < least:
            raise CheckpointError(f"{what}, at byte {offset}, is {value}")
        offset += 4
        return value

    def take(nbytes: int, what: str) -> bytes:
        nonlocal offset
        if nbytes > len(data) - offset:
            raise CheckpointError(f"{what} has {nbytes} bytes, and the file ends after {len(data) - offset} of them")
        offset += nbytes
        return bytes(data[offset - nbytes : offset])

    total = number("the number of entries", 1)
    for place in range(1, total + 1):
        entry = f"entry {place} of {total}"
        name = take(number(f"the length of the name of {entry}", 1), f"the name of {entry}").decode(errors="replace")
        entry = f"{entry} ({one_line(name)[:80]})"
        calls = number(f"the number of sequences of {entry}", 0)
        values = take(4 * number(f"the number of values of {entry}", 1), entry)
        # A file without numbers of sequences has means.
        entries.append((name, (np.frombuffer(values, "<f4"), np.array([max(calls, 1)], np.float32))))
    if twice := find_duplicates(name for name, _ in entries):
        raise CheckpointError(f"it has more than one entry for {first_few(map(one_line, twice), ', ')}")
    if offset == len(data):
        return dict(entries), (), 0
    chunks = number("the number of sequences", 0)
    text = take(number("the length of the data's name", 0), "the data's name").decode(errors="replace")
    return dict(entries), (text,) if text else (), chunks


def write_imatrix(
    path: Path, means: Mapping[str, Tensor], model_type: str, datasets: Sequence[str], chunks: int, chunk_size: int
) -> None:
    """Write an importance matrix atomically in llama.cpp's GGUF format.

    Args:
        means: mean squares [in] of each weight's inputs, by the weight's name in the file.
        datasets: names of the calibration data.
        chunks: number of sequences that were read.
        chunk_size: number of tokens in a sequence.
    """
    writer = GGUFWriter(None, model_type)
    writer.add_type(GGUFType.IMATRIX)
    writer.add_array(Keys.IMatrix.DATASETS, list(datasets))
    writer.add_uint32(Keys.IMatrix.CHUNK_COUNT, chunks)
    writer.add_uint32(Keys.IMatrix.CHUNK_SIZE, chunk_size)
    writer.add_string(OWN_KEY, versions()["diffquant"])
    tokens = chunks * chunk_size
    for name, values in sorted(means.items()):
        writer.add_tensor(name + _SUMS, (values.double() * tokens).float().numpy()[None])
        writer.add_tensor(name + _COUNTS, np.full((1, 1), tokens, np.float32))
    with replace_atomically(path) as file, closing(writer):
        writer.write_header_to_file(file)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
