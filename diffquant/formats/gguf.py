"""A GGUF file of a Llama as a checkpoint, its tensors dequantized when they are read."""

import json
import re
from collections import Counter
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from diffquant.errors import CheckpointError
from diffquant.formats.front_matter import gguf_front_matter
from diffquant.formats.gguf_config import llama_config
from diffquant.formats.gguf_ends import ENDS
from diffquant.formats.gguf_header import Header, read_header
from diffquant.formats.gguf_names import IN_LAYERS
from diffquant.formats.gguf_rope import FACTORS, Factors
from diffquant.formats.gguf_tokenizer import load_gguf_tokenizer
from diffquant.formats.reader import Checkpoint, TensorInfo
from diffquant.support.listing import first_few

_HEAD = "output.weight"
_OUTSIDE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    _HEAD: "lm_head.weight",
}
_PLAIN_TYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
# The first is a part of the config, and the other is computed from it.
_ROTARY = re.compile(rf"{re.escape(FACTORS)}|(blk\.\d+\.)?attn_rot_embd\.weight")
_IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


class GgufCheckpoint(Checkpoint):
    """A GGUF file, mapped; a tensor is dequantized to float32 each time it is read.

    Its tensors already carry the file's own quantization: a weight sweep on it starts from there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = _map(path)
        try:
            header = read_header(self._bytes.data, ENDS)
            _check_kinds(header)
            self._front_matter = gguf_front_matter(header.metadata)
            self.config = llama_config(header, self._factors(header), is_tied=_HEAD not in header.tensors)
        except CheckpointError as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        names = sorted((name for name in header.tensors if not _ROTARY.fullmatch(name)), key=_place)
        self._stored = {_llama_name(name): header.tensors[name] for name in names}
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

    def written_dtype(self, name: str) -> torch.dtype:
        """The file's own for matrices if that is one plain type, else bfloat16; vectors, all but free, stay float32."""
        return torch.float32 if len(self.tensors[name].shape) == 1 else self._matrix_dtype

    @property
    def written_config(self) -> dict[str, Any]:
        return self.config | {"dtype": str(self._matrix_dtype).removeprefix("torch.")}

    @property
    def rounded_as(self) -> str | None:
        matrices: Counter[str] = Counter()
        for stored in self._stored.values():
            if len(stored.shape) > 1 and stored.kind not in _PLAIN_TYPES:
                matrices[stored.kind.name] += stored.nbytes
        return matrices.most_common(1)[0][0] if matrices else None

    @property
    def stored_nbytes(self) -> int:
        """Bytes of the file, which is known by its whole size, tokenizer included."""
        return self.path.stat().st_size

    @cached_property
    def _matrix_dtype(self) -> torch.dtype:
        kinds = {stored.kind for stored in self._stored.values() if len(stored.shape) > 1}
        # Codes with a scale a block have few digits, and bfloat16 the range of float32.
        return _PLAIN_TYPES.get(kinds.pop(), torch.bfloat16) if len(kinds) == 1 else torch.bfloat16

    def weight_files(self) -> list[Path]:
        return [self.path]

    @property
    def front_matter(self) -> dict[str, Any]:
        return self._front_matter

    @cached_property
    def tokenizer(self) -> Any:
        # It takes a second and more.
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

    def _factors(self, header: Header) -> Factors | None:
        """Divisors of the frequencies of each pair of channels, if the file has them."""
        stored = header.tensors.get(FACTORS)
        if stored is None:
            return None
        data = self._bytes[stored.start : stored.start + stored.nbytes].reshape(*stored.shape[:-1], -1)
        return dequantize(data, stored.kind).astype(np.float64).ravel()

    def _interleaved_heads(self, name: str) -> int | None:
        """Number of heads of a projection that llama.cpp stores for interleaved rotation, or None for other tensors."""
        if ".q_proj." in name:
            return int(self.config["num_attention_heads"])
        if ".k_proj." in name:
            return int(self.config.get("num_key_value_heads") or self.config["num_attention_heads"])
        return None


def _map(path: Path) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """The file's bytes, mapped read-only.

    Raises:
        CheckpointError: the file is absent or empty.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    if path.stat().st_size == 0:
        raise CheckpointError(f"cannot read {path}: it is empty")
    return np.asarray(np.memmap(path, np.uint8, mode="r"))


def _check_kinds(header: Header) -> None:
    """Check that gguf dequantizes what the tensors hold.

    Raises:
        CheckpointError: it cannot; the first are named.
    """
    unread = [f"{name} is {t.kind.name}" for name, t in header.tensors.items() if not _is_dequantized(t.kind)]
    if unread:
        raise CheckpointError(f"gguf dequantizes no tensor of these types: {first_few(unread, ', ')}")


@cache
def _is_dequantized(kind: GGMLQuantizationType) -> bool:
    from gguf.constants import GGML_QUANT_SIZES

    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _values(data: "np.ndarray[Any, np.dtype[np.uint8]]", kind: GGMLQuantizationType) -> Tensor:
    """The values of rows of bytes, as float32."""
    values = dequantize(data, kind)
    return torch.from_numpy(values if values.flags.writeable else values.copy())


@cache
def _stored_rows(rows: int, heads: int) -> Tensor:
    """The row at which the file stores each row of a projection whose heads rotate by halves."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


def _llama_name(name: str) -> str:
    """The name that transformers gives a tensor; the file's own where a Llama has no such tensor."""
    match = _IN_LAYER.fullmatch(name)
    if match and match[2] in IN_LAYERS:
        return f"model.layers.{match[1]}.{IN_LAYERS[match[2]]}.weight"
    return _OUTSIDE_LAYERS.get(name, name)


def _place(name: str) -> tuple[int, int, int]:
    """The place of a tensor in a Llama's order: embedding, layers, norm, head, then anything else."""
    match = _IN_LAYER.fullmatch(name)
    if match and match[2] in IN_LAYERS:
        return 1, int(match[1]), list(IN_LAYERS).index(match[2])
    outer = list(_OUTSIDE_LAYERS)
    return (0 if name == outer[0] else 2), 0, outer.index(name) if name in outer else len(outer)
