"""Small random checkpoints of every source, sharp enough that a wrong row shows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM

from diffquant.calib.calibration.kv_cache import calibrate_cache
from diffquant.export import ExportOptions
from diffquant.model.adapters import adapter_for
from diffquant.scheme import Recipe
from diffquant.source.ranges import Ranges

SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "initializer_range": 0.2,
    "eos_token_id": None,
}
_UNILM = SIZES | {
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
}
CONFIGS = {
    "unilm-v1": _UNILM | {"model_type": "diff_v1"},
    "unilm-v1-plain": _UNILM
    | {"model_type": "diff_v1", "gqa_pairing": "plain", "rope_style": "half", "attention_bias": True},
    "unilm-v2": _UNILM | {"model_type": "diff_v2", "tie_word_embeddings": False},
    "unilm-v2-half": _UNILM | {"model_type": "diff_v2", "rope_style": "half", "mlp_bias": True},
}
SOURCES = ["diffllama", "llama", *CONFIGS]


def write_checkpoint(folder: Path, source: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A checkpoint of one of `SOURCES`."""
    torch.manual_seed(0)
    if source == "diffllama":
        DiffLlamaForCausalLM(DiffLlamaConfig(**(SIZES | changes))).to(dtype).save_pretrained(folder)
    elif source == "llama":
        LlamaForCausalLM(LlamaConfig(**(SIZES | changes))).to(dtype).save_pretrained(folder)
    else:
        _write_random(folder, CONFIGS[source] | changes, dtype)
    return folder


def random_ids(batch: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, SIZES["vocab_size"], (batch, length))


def cache_ranges(source: Path, options: ExportOptions) -> Ranges | None:
    """Ranges of an export's quantized cache, found on random tokens; None for one in the activations' type."""
    if options.kv_bits == 16:
        return None
    return calibrate_cache(source, Recipe(weights=options.weights), torch.from_numpy(random_ids(2, 64)))


def _write_random(folder: Path, config: dict[str, Any], dtype: torch.dtype) -> None:
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: (torch.randn(shape, generator=generator) * 0.2 + (1.0 if "norm" in name else 0)).to(dtype)
        for name, shape in adapter_for(config).source_shapes().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
