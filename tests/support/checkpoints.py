"""Small random checkpoints of every source, to quantize, convert, export and damage."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from diffquant.model.adapters import adapter_for
from tests.support import models

_FEW = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96}
SIZES: dict[str, Any] = models.SIZES | _FEW
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_UNILM = SIZES | {"rms_norm_eps": 1e-5, "rope_parameters": _ROPE, "tie_word_embeddings": True}
# All that a config of unilm's has to give.
TWO_LAYERS: dict[str, Any] = {"vocab_size": 90, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
TWO_LAYERS |= {"num_attention_heads": 8, "head_dim": 16, "rms_norm_eps": 1e-5}
_PLAIN = {"gqa_pairing": "plain", "rope_style": "half", "attention_bias": True}
UNILM: dict[str, dict[str, Any]] = {
    "unilm-v1": _UNILM | {"model_type": "diff_v1"},
    "unilm-v1-plain": _UNILM | {"model_type": "diff_v1"} | _PLAIN,
    "unilm-v2": _UNILM | {"model_type": "diff_v2", "tie_word_embeddings": False},
    "unilm-v2-half": _UNILM | {"model_type": "diff_v2", "rope_style": "half", "mlp_bias": True},
}
_MOTIF = SIZES | {"model_type": "Motif", "hidden_act": "poly_norm"}
# Two noise heads that four signal heads share each, over two KV pairs; heads are no share of the width.
_GROUPS = {"num_attention_heads": 10, "num_noise_heads": 2, "num_key_value_heads": 4, "k_ratio": 1, "head_dim": 12}
MOTIF: dict[str, dict[str, Any]] = {
    "motif": _MOTIF | {"rope_theta": 1e4, "attn_rms_norm_eps": 1e-4, "use_bias": True},
    "motif-grouped": _MOTIF | {"model_type": "motif"} | _GROUPS,
}
# All five kinds of layers, a window that texts of a few tokens reach beyond, a convolution of another width.
_SAMBA = {"layer_norm_eps": 1e-4, "tie_word_embeddings": True, "sliding_window": 6, "mamba_d_state": 5}
_SAMBA |= {"mamba_d_conv": 3, "num_hidden_layers": 8}
PHI4FLASH: dict[str, dict[str, Any]] = {"phi4flash": SIZES | {"model_type": "phi4flash"} | _SAMBA}
# V3's two gates and Motif-3's output gate, which no public source has together: two pairs share a noise head.
_GATED = {"pairs": 4, "kv_pairs": 2, "head_dim": 16, "value_dim": 16, "shared_k": True, "lam": "two-gates"}
NATIVE: dict[str, dict[str, Any]] = {
    "gated": SIZES | {"model_type": "diff_transformer", "spec": _GATED | {"signals_per_noise": 2, "output_gate": True}}
}
# Both kinds of layers, dense ones and experts; no two sizes are alike, and texts of a few tokens reach beyond a window.
MOTIF3: dict[str, Any] = SIZES | json.loads("""{
 "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 5, "num_attention_heads": 10,
 "max_position_embeddings": 64, "model_type": "Motif", "architectures": ["MotifForCausalLM"], "num_noise_heads": 2,
 "head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 6, "q_lora_rank": 14, "kv_lora_rank": 10,
 "attention_cls": "gdla", "diff_v2": true, "elementwise_attn_output_gate": true, "moe_intermediate_size": 7,
 "num_experts": 6, "experts_top_k": 2, "num_shared_experts": 1, "n_dense_first_layers": 1, "score_func": "sigmoid",
 "route_norm": true, "route_scale": 2.0, "load_balance_coeff": 0.0001, "hidden_act": "poly_norm",
 "polynorm_output_scale": 0.5, "polynorm_output_scale_per_layer": {"3": 0.75}, "polynorm_bias_clamp": 0.125,
 "hidden_clamp": 1000000.0, "rms_norm_eps": 1e-05, "mhc_enabled": true, "mhc_expansion_rate": 3,
 "use_sliding_window": true, "sliding_window": 2, "sliding_window_period": 2, "swa_rope_theta": 5000.0,
 "original_seq_len": 4, "rope_factor": 8,
 "rope_scaling": {"rope_type": "yarn", "factor": 8, "original_max_position_embeddings": 4,
  "beta_fast": 2, "beta_slow": 0.01, "rope_theta": 100.0, "apply_yarn_scaling": false},
 "num_nextn_predict_layers": 1, "tie_word_embeddings": false
}""")
SOURCES = ["diffllama", "llama", *UNILM, *MOTIF, *NATIVE]


def write_checkpoint(folder: Path, source: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A checkpoint of two layers of one of `SOURCES`, without a token that ends a text."""
    own = PHI4FLASH | {"motif3": MOTIF3}
    layers = own[source]["num_hidden_layers"] if source in own else 2
    changes = {"num_hidden_layers": layers, "eos_token_id": None} | changes
    if source == "diffllama":
        write_diffllama(folder, dtype, **changes)
    elif source == "llama":
        write_llama(folder, dtype, **changes)
    else:
        write_random(folder, (UNILM | MOTIF | NATIVE | own)[source] | changes, dtype)
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


def set_number(folder: Path, name: str, place: tuple[int, ...], value: float) -> None:
    """Replace one number of a tensor in a checkpoint of one file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[name][place] = value
    save_file(tensors, file, metadata={"format": "pt"})


def edit_json(file: Path, **changes: Any) -> None:
    """Change top-level fields of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
