"""A GGUF file of a Llama as a checkpoint, its tensors dequantized when they are read."""

import json
import re
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from diffquant.errors import CheckpointError
from diffquant.formats.gguf_header import Header, Value, read_header
from diffquant.formats.reader import Checkpoint, TensorInfo

_SIZES = {
    "max_position_embeddings": "context_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "hidden_size": "embedding_length",
    "head_dim": "rope.dimension_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "vocab_size": "vocab_size",
}
_TOKENS = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "unk_token_id": "unknown_token_id",
    "pad_token_id": "padding_token_id",
}
# What LlamaConfig has where a file says nothing, as a test checks.
_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pretraining_tp": 1,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
}
_THETA = 10000.0

# In the order of a Llama's layer.
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
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
# Tables that are computed from the config.
_ROTARY = ("rope_freqs.weight", "attn_rot_embd.weight")
_IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


class GgufCheckpoint(Checkpoint):
    """A GGUF file, mapped; a tensor is dequantized to float32 each time it is read.

    Its tensors already carry the file's own quantization: a weight sweep on it starts from there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = _map(path)
        try:
            header = read_header(self._bytes.data)
            self.config = _config(header)
            _check_kinds(header)
        except CheckpointError as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        names = sorted((name for name in header.tensors if not name.endswith(_ROTARY)), key=_place)
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

    def write_side_files(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                self.path.parent, gguf_file=self.path.name, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            raise CheckpointError(f"cannot read the tokenizer in {self.path}: {error}") from error
        tokenizer.save_pretrained(folder)
        tokens = {
            key: self.config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in self.config
        }
        (folder / "generation_config.json").write_text(json.dumps(tokens, indent=2) + "\n")

    def _interleaved_heads(self, name: str) -> int | None:
        """The number of heads of a projection whose rows llama.cpp stores for interleaved rotation; None for others."""
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


def _config(header: Header) -> dict[str, Any]:
    """The content of config.json for the Llama in a GGUF file.

    Raises:
        CheckpointError: the file holds another model.
    """
    metadata = header.metadata
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"it holds a model of architecture {architecture!r}, and only a llama's GGUF is read")
    stated = {key: metadata.get(f"llama.{theirs}") for key, theirs in _SIZES.items()}
    stated |= {key: metadata.get(f"tokenizer.ggml.{theirs}") for key, theirs in _TOKENS.items()}
    if stated["vocab_size"] is None:
        stated["vocab_size"] = metadata.get("tokenizer.ggml.tokens")
    config = _DEFAULTS | {key: value for key, value in stated.items() if value is not None}
    return (
        config
        | _derived(config)
        | {
            "dtype": "float32",
            "tie_word_embeddings": _HEAD not in header.tensors,
            "rope_parameters": {"rope_theta": metadata.get("llama.rope.freq_base", _THETA), "rope_type": "default"},
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
        }
    )


def _derived(config: dict[str, Value]) -> dict[str, Value]:
    """The entries that a Llama's config fills in from other sizes."""
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(width, int) or heads < 1:
        return {}
    return {
        "num_key_value_heads": config.get("num_key_value_heads", heads),
        "head_dim": config.get("head_dim", width // heads),
    }


def _check_kinds(header: Header) -> None:
    """Check that gguf dequantizes what the tensors hold.

    Raises:
        CheckpointError: it cannot; every such tensor is named.
    """
    unread = [f"{name} is {t.kind.name}" for name, t in header.tensors.items() if not _is_dequantized(t.kind)]
    if unread:
        raise CheckpointError(f"gguf dequantizes no tensor of these types: {', '.join(unread)}")


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
    if match and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.weight"
    return _OUTSIDE_LAYERS.get(name, name)


def _place(name: str) -> tuple[int, int, int]:
    """The place of a tensor in a Llama's order: embedding, layers, norm, head, then anything else."""
    match = _IN_LAYER.fullmatch(name)
    if match and match[2] in _LAYER:
        return 1, int(match[1]), list(_LAYER).index(match[2])
    outer = list(_OUTSIDE_LAYERS)
    return (0 if name == outer[0] else 2), 0, outer.index(name) if name in outer else len(outer)
