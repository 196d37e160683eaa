"""A GGUF file of a Llama as a checkpoint, its tensors dequantized when they are read."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from diffquant.checkpoints.gguf_config import IN_LAYERS, make_llama_config
from diffquant.checkpoints.gguf_header import StoredTensor, read_header
from diffquant.checkpoints.gguf_rope import FACTORS, Factors
from diffquant.checkpoints.gguf_tokenizer import ENDS, load_gguf_tokenizer
from diffquant.checkpoints.reader import Checkpoint, TensorInfo
from diffquant.checkpoints.side_files import gguf_front_matter
from diffquant.errors import CheckpointError
from diffquant.support.files import check_regular_file
from diffquant.support.names import first_few

# Metadata key that marks files written by diffquant; only these may be overwritten.
OWN_KEY = "diffquant.version"
_HEAD = "output.weight"
OUTSIDE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    _HEAD: "lm_head.weight",
}
PLAIN_TYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
# The first is a part of the config, and the other is computed from it.
_ROTARY = re.compile(rf"{re.escape(FACTORS)}|(blk\.\d+\.)?attn_rot_embd\.weight")
_IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_IN_LLAMA = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
_NAMES = {ours: theirs for theirs, ours in OUTSIDE_LAYERS.items()}
_PARTS = {ours: theirs for theirs, ours in IN_LAYERS.items()}


class GgufCheckpoint(Checkpoint):
    """A mapped GGUF file; a tensor is dequantized to float32 each time it is read.

    If the file is quantized, so are these values: a weight sweep on it quantizes them a second time.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = map_file(path)
        try:
            metadata, tensors, ids = read_header(self._bytes.data, ENDS)
            _check_kinds(tensors)
            self._front_matter = gguf_front_matter(metadata)
            self.config = make_llama_config(metadata, ids, self._factors(tensors), is_tied=_HEAD not in tensors)
        except CheckpointError as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        names = sorted((name for name in tensors if not _ROTARY.fullmatch(name)), key=_place)
        self._stored = {_llama_name(name): tensors[name] for name in names}
        self.tensors = {
            name: TensorInfo(torch.float32, stored.shape, path.name) for name, stored in self._stored.items()
        }

    def read(self, name: str) -> Tensor:
        return self.read_rows(name, slice(None))

    def read_rows(self, name: str, rows: slice | Tensor) -> Tensor:
        stored = self._stored[name]
        data = self._bytes[stored.start : stored.start + stored.nbytes].reshape(*stored.shape[:-1], -1)
        heads = self._interleaved_heads(name)
        if heads is not None:
            rows = _stored_rows(len(data), heads)[rows]
        if len(stored.shape) == 1:
            return _values(data, stored.kind)[rows]
        return _values(data[rows.numpy() if isinstance(rows, Tensor) else rows], stored.kind)

    def output_dtype(self, name: str) -> torch.dtype:
        """Return float32 for vectors; for matrices their dtype if all have the same unquantized one, else bfloat16."""
        return torch.float32 if len(self.tensors[name].shape) == 1 else self._matrix_dtype

    @property
    def output_config(self) -> dict[str, Any]:
        return self.config | {"dtype": str(self._matrix_dtype).removeprefix("torch.")}

    @property
    def earlier_format(self) -> str | None:
        # Matrices are counted, not bytes, of which an embedding has most in a small model.
        kinds = (stored.kind for stored in self._stored.values() if len(stored.shape) > 1)
        matrices = Counter(kind.name for kind in kinds if kind not in PLAIN_TYPES)
        return matrices.most_common(1)[0][0] if matrices else None

    @property
    def stored_nbytes(self) -> int:
        """Bytes of the whole file, tokenizer included."""
        return self.path.stat().st_size

    @cached_property
    def _matrix_dtype(self) -> torch.dtype:
        kinds = {stored.kind for stored in self._stored.values() if len(stored.shape) > 1}
        # Values quantized in blocks have few significant digits, and bfloat16 has the range of float32.
        return PLAIN_TYPES.get(kinds.pop(), torch.bfloat16) if len(kinds) == 1 else torch.bfloat16

    def weight_files(self) -> list[Path]:
        return [self.path]

    @property
    def front_matter(self) -> dict[str, Any]:
        return self._front_matter

    @cached_property
    def tokenizer(self) -> Any:
        # Loading takes a second or more.
        return load_gguf_tokenizer(self.path)

    def write_side_files(self, folder: Path) -> None:
        try:
            tokenizer = self.tokenizer
        except Exception as error:
            raise CheckpointError(f"cannot read the tokenizer in {self.path}: {error}") from error
        tokenizer.save_pretrained(folder)
        tokens = {
            key: self.config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in self.config
        }
        (folder / "generation_config.json").write_text(json.dumps(tokens, indent=2) + "\n")

    def _factors(self, tensors: Mapping[str, StoredTensor]) -> Factors | None:
        """Return the divisor of each channel pair's rotary frequency, or None if the file has none."""
        stored = tensors.get(FACTORS)
        if stored is None:
            return None
        data = self._bytes[stored.start : stored.start + stored.nbytes].reshape(*stored.shape[:-1], -1)
        return dequantize(data, stored.kind).astype(np.float64).ravel()

    def _interleaved_heads(self, name: str) -> int | None:
        """Return the number of heads of a projection stored for interleaved rotation, or None if it is not one."""
        if ".q_proj." in name:
            return int(self.config["num_attention_heads"])
        if ".k_proj." in name:
            return int(self.config.get("num_key_value_heads") or self.config["num_attention_heads"])
        return None


def is_own_gguf(file: Path, kind: str) -> bool:
    """Return whether a file is a GGUF file that diffquant wrote, with `kind` as general.type: "model" or "imatrix"."""
    try:
        check_regular_file(file)
        metadata = read_header(map_file(file).data)[0]
    except (OSError, ValueError, CheckpointError):
        return False
    return OWN_KEY in metadata and metadata.get("general.type") == kind


def map_file(path: Path) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Map a file's bytes into memory, read-only.

    Raises:
        CheckpointError: the file is absent or empty.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    if path.stat().st_size == 0:
        raise CheckpointError(f"cannot read {path}: it is empty")
    return np.asarray(np.memmap(path, np.uint8, mode="r"))


def _check_kinds(tensors: Mapping[str, StoredTensor]) -> None:
    """Check that gguf can dequantize the tensors.

    Raises:
        CheckpointError: it cannot; the message lists the first.
    """
    unread = [f"{name} is {t.kind.name}" for name, t in tensors.items() if not _is_dequantized(t.kind)]
    if unread:
        raise CheckpointError(f"gguf cannot dequantize these types: {first_few(unread, ', ')}")


@cache
def _is_dequantized(kind: GGMLQuantizationType) -> bool:
    from gguf.constants import GGML_QUANT_SIZES

    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _values(data: "np.ndarray[Any, np.dtype[np.uint8]]", kind: GGMLQuantizationType) -> Tensor:
    """Dequantize rows of bytes to float32."""
    values = dequantize(data, kind)
    return torch.from_numpy(values if values.flags.writeable else values.copy())


@cache
def _stored_rows(rows: int, heads: int) -> Tensor:
    """Return the row at which the file stores each row of a projection whose heads rotate by halves."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


def _llama_name(name: str) -> str:
    """Return transformers' name for a tensor, or the file's own if a Llama has no such tensor."""
    match = _IN_LAYER.fullmatch(name)
    if match and match[2] in IN_LAYERS:
        return f"model.layers.{match[1]}.{IN_LAYERS[match[2]]}.weight"
    return OUTSIDE_LAYERS.get(name, name)


def to_gguf_name(name: str) -> str:
    """Return the name that a Llama's tensor has in GGUF files; the name of any other tensor is returned unchanged."""
    match = _IN_LLAMA.fullmatch(name)
    if match and match[2] in _PARTS:
        return f"blk.{match[1]}.{_PARTS[match[2]]}.weight"
    return _NAMES.get(name, name)


def _place(name: str) -> tuple[int, int, int]:
    """Return the sort key of a tensor in a Llama: embedding, layers, norm, head, then anything else."""
    match = _IN_LAYER.fullmatch(name)
    if match and match[2] in IN_LAYERS:
        return 1, int(match[1]), list(IN_LAYERS).index(match[2])
    outer = list(OUTSIDE_LAYERS)
    return (0 if name == outer[0] else 2), 0, outer.index(name) if name in outer else len(outer)
