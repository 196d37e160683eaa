"""Small checkpoints to quantize, convert and damage."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM

from diffquant.model.adapters import adapter_for

SIZES = {
    "vocab_size": 90,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def write_diffllama(folder: Path, dtype: torch.dtype = torch.float32, shard_size: str = "5GB", **sizes: Any) -> Path:
    """A random stock DiffLlama, as its own `save_pretrained` writes it."""
    return _write(DiffLlamaForCausalLM, DiffLlamaConfig(**(SIZES | sizes)), folder, dtype, shard_size)


def write_llama(folder: Path, dtype: torch.dtype = torch.float32, shard_size: str = "5GB", **sizes: Any) -> Path:
    return _write(LlamaForCausalLM, LlamaConfig(**(SIZES | sizes)), folder, dtype, shard_size)


def write_random(folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Random tensors for a config without a stock model, in one file; the tensors."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: (torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3 + (1.0 if "norm" in name else 0)).to(
            dtype
        )
        for name, shape in adapter_for(config).source_shapes().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _write(model_class: Any, config: Any, folder: Path, dtype: torch.dtype, shard_size: str) -> Path:
    torch.manual_seed(0)
    model_class(config).to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    return folder
