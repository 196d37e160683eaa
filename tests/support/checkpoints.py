"""Small random checkpoints of every source, to quantize, convert, export and damage."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from diffquant.model.adapters import adapter_for
from tests.support import models

SIZES: dict[str, Any] = models.SIZES | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
}
_UNILM = SIZES | {
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
}
UNILM: dict[str, dict[str, Any]] = {
    "unilm-v1": _UNILM | {"model_type": "diff_v1"},
    "unilm-v1-plain": _UNILM
    | {"model_type": "diff_v1", "gqa_pairing": "plain", "rope_style": "half", "attention_bias": True},
    "unilm-v2": _UNILM | {"model_type": "diff_v2", "tie_word_embeddings": False},
    "unilm-v2-half": _UNILM | {"model_type": "diff_v2", "rope_style": "half", "mlp_bias": True},
}
MOTIF: dict[str, dict[str, Any]] = {
    "motif": SIZES
    | {
        "model_type": "Motif",
        "hidden_act": "poly_norm",
        "rope_theta": 1e4,
        "attn_rms_norm_eps": 1e-4,
        "use_bias": True,
    },
    # Two noise heads that four signal heads share each, over two KV pairs; heads are no share of the width.
    "motif-grouped": SIZES
    | {
        "model_type": "motif",
        "hidden_act": "poly_norm",
        "num_attention_heads": 10,
        "num_noise_heads": 2,
        "num_key_value_heads": 4,
        "k_ratio": 1,
        "head_dim": 12,
    },
}
# All five kinds of layers, a window that texts of a few tokens reach beyond, a convolution of another width.
PHI4FLASH: dict[str, dict[str, Any]] = {
    "phi4flash": SIZES
    | {
        "model_type": "phi4flash",
        "num_hidden_layers": 8,
        "layer_norm_eps": 1e-4,
        "tie_word_embeddings": True,
        "sliding_window": 6,
        "mamba_d_state": 5,
        "mamba_d_conv": 3,
    }
}
# V3's two gates and Motif-3's output gate, which no public source has together: two pairs share a noise head.
_GATED = {"pairs": 4, "kv_pairs": 2, "head_dim": 16, "value_dim": 16, "shared_k": True, "lam": "two-gates"}
NATIVE: dict[str, dict[str, Any]] = {
    "gated": SIZES | {"model_type": "diff_transformer", "spec": _GATED | {"signals_per_noise": 2, "output_gate": True}},
}
SOURCES = ["diffllama", "llama", *UNILM, *MOTIF, *NATIVE]


def write_checkpoint(folder: Path, source: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A checkpoint of two layers of one of `SOURCES`, without a token that ends a text."""
    layers = PHI4FLASH[source]["num_hidden_layers"] if source in PHI4FLASH else 2
    changes = {"num_hidden_layers": layers, "eos_token_id": None} | changes
    if source == "diffllama":
        write_diffllama(folder, dtype, **changes)
    elif source == "llama":
        write_llama(folder, dtype, **changes)
    else:
        write_random(folder, (UNILM | MOTIF | NATIVE | PHI4FLASH)[source] | changes, dtype)
    return folder


def write_diffllama(folder: Path, dtype: torch.dtype = torch.float32, shard_size: str = "5GB", **changes: Any) -> Path:
    """A random stock DiffLlama, as its own `save_pretrained` writes it."""
    models.random_diffllama(**(SIZES | changes)).to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def write_llama(folder: Path, dtype: torch.dtype = torch.float32, shard_size: str = "5GB", **changes: Any) -> Path:
    """A random stock Llama, as its own `save_pretrained` writes it."""
    models.random_llama(**(SIZES | changes)).to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def write_random(folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Random tensors for a config without a stock model, in one file; the tensors."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, shape in adapter_for(config).source_shapes().items():
        normal = torch.randn(shape, generator=generator, dtype=torch.float64)
        tensors[name] = (normal * 0.3 + (1.0 if "norm" in name else 0)).to(dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of each file of a folder, by name."""
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def edit_json(file: Path, **changes: Any) -> None:
    """Change top-level fields of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
