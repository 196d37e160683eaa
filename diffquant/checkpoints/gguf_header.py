"""The header of a GGUF file: its metadata, and where each tensor's data lies.

gguf's own reader makes an array of every token and every merge of the tokenizer, which takes seconds. Here, only the
length of an array of texts is read.

Source: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from diffquant.checkpoints.side_files import POINTER, is_lfs_pointer
from diffquant.errors import CheckpointError
from diffquant.support.names import find_duplicates

_MAGIC = b"GGUF"
_TOKENS = "tokenizer.ggml.tokens"
_VERSIONS = (2, 3)
_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}

Numbers = tuple[int | float, ...]
Value = int | float | bool | str | Numbers | tuple[str, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the file stores it.

    Attributes:
        kind: format in which its values are stored.
        shape: sizes [rows, width] or [width], in the reverse of the file's order.
        start: offset of its first byte in the file.
    """

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int

    @property
    def row_nbytes(self) -> int:
        block, nbytes = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * nbytes

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_nbytes

    @property
    def has_whole_blocks(self) -> bool:
        return self.shape[-1] % GGML_QUANT_SIZES[self.kind][0] == 0


# Metadata by key, in which an array of texts is represented by its length, except those of `general.` and `imatrix.`;
# tensors by the file's names; and the id of each requested token that is in the vocabulary, by its text.
Header = tuple[Mapping[str, Value], Mapping[str, StoredTensor], Mapping[str, int]]


def read_header(data: memoryview, tokens: Iterable[str] = ()) -> Header:
    """Read the header of a GGUF file.

    Args:
        data: bytes of the file, mapped.
        tokens: texts of tokens to look for in the vocabulary.

    Returns:
        Metadata by key; tensors by the file's names; and the ids of the found tokens, by text. An array of texts is
        replaced by its length, except under keys that begin with "general." or "imatrix.".

    Raises:
        CheckpointError: it is not a GGUF file of version 2 or 3, is truncated, has a key or a tensor twice, or has
            tensors of types that gguf does not support, or with data beyond its end; the message names all of these.
    """
    if is_lfs_pointer(data):
        raise CheckpointError(POINTER)
    if bytes(data[:4]) != _MAGIC:
        raise CheckpointError("it is not a GGUF file, since it does not begin with 'GGUF'")
    cursor = _Cursor(data, len(_MAGIC), {text.encode(): text for text in tokens})
    try:
        version = cursor.scalar("I")
        if version not in _VERSIONS:
            raise CheckpointError(f"its GGUF version is {version}; supported are {' and '.join(map(str, _VERSIONS))}")
        tensor_count, key_count = cursor.scalar("Q"), cursor.scalar("Q")
        pairs = [cursor.pair() for _ in range(key_count)]
        entries = [cursor.tensor() for _ in range(tensor_count)]
    except (struct.error, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"its header is cut off or damaged at byte {cursor.offset} of {len(data)}") from error
    _check_unique([key for key, _ in pairs], [name for name, *_ in entries])
    metadata = dict(pairs)
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise CheckpointError(f"its general.alignment is {alignment!r}, not a positive number of bytes")
    data_start = math.ceil(cursor.offset / alignment) * alignment
    return metadata, _check_tensors(entries, data_start, len(data)), cursor.ids


# A tensor's name, shape, type and offset, which counts from the start of the data.
_Entry = tuple[str, tuple[int, ...], int, int]


class _Cursor:
    """A position in the file that advances as values are read; it collects the ids of some tokens."""

    def __init__(self, data: memoryview, offset: int, tokens: Mapping[bytes, str]) -> None:
        self.data, self.offset, self._tokens = data, offset, tokens
        self.ids: dict[str, int] = {}

    def scalar(self, letter: str) -> int:
        """Read the next number; `letter` is its type as in `struct`."""
        value: int
        (value,) = struct.unpack_from("<" + letter, self.data, self.offset)
        self.offset += struct.calcsize("<" + letter)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        self._require(length)
        text = str(self.data[self.offset : self.offset + length], "utf-8")
        self.offset += length
        return text

    def pair(self) -> tuple[str, Value]:
        """Read the next key of metadata with its value."""
        key = self.string()
        if key == _TOKENS:
            self._find(self.offset)
        # Other arrays are the tokenizer's; only their length is needed.
        return key, self._value(self.scalar("I"), key.startswith(("general.", "imatrix.")))

    def _value(self, kind: int, keep_strings: bool) -> Value:
        """Read the next value of metadata: of an array of texts, all texts if `keep_strings`, otherwise the length."""
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            return self._array(keep_strings)
        return self.scalar(self._letter(kind))

    def tensor(self) -> _Entry:
        name = self.string()
        dimensions = self.scalar("I")
        self._require(8 * dimensions)
        shape = tuple(self.scalar("Q") for _ in range(dimensions))
        return name, shape[::-1], self.scalar("I"), self.scalar("Q")

    def _array(self, keep_strings: bool = False) -> Value:
        kind, length = self.scalar("I"), self.scalar("Q")
        if keep_strings and kind == GGUFValueType.STRING:
            return tuple(self.string() for _ in range(length))
        if kind in (GGUFValueType.STRING, GGUFValueType.ARRAY):
            for _ in range(length):
                self._skip(self.scalar("Q")) if kind == GGUFValueType.STRING else self._array()
            return length
        letter = self._letter(kind)
        start = self.offset
        self._skip(length * struct.calcsize("<" + letter))
        return struct.unpack_from(f"<{length}{letter}", self.data, start)

    def _find(self, start: int) -> None:
        """Store the ids of the tokens looked for, if an array of texts begins here; the position does not change."""
        longest = max(map(len, self._tokens), default=0)
        if longest and (self.scalar("I"), self.scalar("I")) == (GGUFValueType.ARRAY, GGUFValueType.STRING):
            for token in range(self.scalar("Q")):
                length = self.scalar("Q")
                text = self.data[self.offset : self.offset + min(length, longest + 1)].tobytes()
                if text in self._tokens:
                    self.ids[self._tokens[text]] = token
                self._skip(length)
        self.offset = start

    def _letter(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise CheckpointError(f"its header is damaged at byte {self.offset}: metadata type {kind} does not exist")
        return _SCALARS[GGUFValueType(kind)]

    def _skip(self, nbytes: int) -> None:
        self._require(nbytes)
        self.offset += nbytes

    def _require(self, nbytes: int) -> None:
        if nbytes > len(self.data) - self.offset:
            raise struct.error


def _check_unique(keys: list[str], tensors: list[str]) -> None:
    """Check that no key or tensor is repeated, since readers would disagree about which one to use.

    Raises:
        CheckpointError: something is; all of it is named.
    """
    twice = [f"the key {key}" for key in find_duplicates(keys)]
    twice += [f"the tensor {name}" for name in find_duplicates(tensors)]
    if twice:
        raise CheckpointError(f"it gives {', '.join(twice)} more than once")


def _check_tensors(entries: list[_Entry], data_start: int, file_nbytes: int) -> dict[str, StoredTensor]:
    kinds = {int(kind) for kind in GGMLQuantizationType}
    unknown = [f"{name} has type {kind}" for name, _, kind, _ in entries if kind not in kinds]
    if unknown:
        raise CheckpointError(f"{', '.join(unknown)}, which this gguf does not support; upgrade gguf")
    tensors = {
        name: StoredTensor(GGMLQuantizationType(kind), shape, data_start + offset)
        for name, shape, kind, offset in entries
    }
    broken = [
        f"{name} {list(t.shape)} has no whole blocks of {t.kind.name}"
        for name, t in tensors.items()
        if not t.shape or not t.has_whole_blocks
    ]
    if broken:
        raise CheckpointError(", ".join(broken))
    beyond = [name for name, tensor in tensors.items() if tensor.start + tensor.nbytes > file_nbytes]
    if beyond:
        raise CheckpointError(
            f"it ends at byte {file_nbytes}, before data of {len(beyond)} of its {len(tensors)} tensors, the first "
            f"{beyond[0]}; download it again"
        )
    return tensors
