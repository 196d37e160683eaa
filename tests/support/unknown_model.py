"""A random checkpoint of an architecture that is quantized by its tensors' names and not run."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, VOCAB, LATENT, EXPERTS, EXPERT_WIDTH, DENSE_WIDTH = 64, 70, 32, 5, 96, 160
CONFIG: dict[str, Any] = {"model_type": "latent-mixture", "architectures": ["LatentMixtureForCausalLM"]}
CONFIG |= {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": 3, "kv_lora_rank": LATENT}
CONFIG |= {"num_experts": EXPERTS, "diff_v2": True}

_ATTENTION: dict[str, tuple[int, ...]] = {
    "wq_a.weight": (LATENT, HIDDEN),
    "q_norm.weight": (LATENT,),
    "wq_b.weight": (10 * 24, LATENT),
    "wq_b_gate.weight": (8 * 16, LATENT),
    "wkv_a.weight": (LATENT + 8, HIDDEN),
    "kv_norm.weight": (LATENT,),
    "wkv_b.weight": (2 * 32, LATENT),
    "lambda_proj.weight": (8, HIDDEN),
    "wo.weight": (HIDDEN, 8 * 16),
}
_DENSE: dict[str, tuple[int, ...]] = {
    "gate_proj.weight": (DENSE_WIDTH, HIDDEN),
    "up_proj.weight": (DENSE_WIDTH, HIDDEN),
    "down_proj.weight": (HIDDEN, DENSE_WIDTH),
    "act_fn.weight": (3,),
    "act_fn.bias": (1,),
}
_SPARSE: dict[str, tuple[int, ...]] = {
    "router.weight": (EXPERTS, HIDDEN),
    "expert_bias": (EXPERTS,),
    "experts.gate_up_proj": (EXPERTS, 2 * EXPERT_WIDTH, HIDDEN),
    "experts.down_proj": (EXPERTS, HIDDEN, EXPERT_WIDTH),
    "experts.act_fn.weight": (EXPERTS, 3),
    "shared_expert.gate_proj.weight": (EXPERT_WIDTH, HIDDEN),
    "shared_expert.up_proj.weight": (EXPERT_WIDTH, HIDDEN),
    "shared_expert.down_proj.weight": (HIDDEN, EXPERT_WIDTH),
}
_STREAMS: dict[str, tuple[int, ...]] = {
    "attn_mhc.proj.weight": (24, 4 * HIDDEN),
    "attn_mhc.alpha": (3,),
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
}

PACKED = [
    *(f"self_attn.{name}" for name in ("wq_a", "wq_b", "wkv_a", "wkv_b", "wo")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    *(f"mlp.shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    *(f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")),
]


def unknown_shapes(tied: bool = False) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor: the first layer is dense, two have experts."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(3):
        parts = {"self_attn": _ATTENTION, "mlp": _SPARSE if layer else _DENSE}
        named = {f"{part}.{name}": shape for part, members in parts.items() for name, shape in members.items()}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in (named | _STREAMS).items()}
    return shapes | {"model.norm.weight": (HIDDEN,)} | ({} if tied else {"lm_head.weight": (VOCAB, HIDDEN)})


def write_unknown(
    folder: Path, dtype: torch.dtype = torch.bfloat16, shards: int = 1, tied: bool = False
) -> dict[str, Tensor]:
    """Write a random one; λ projections, routers and activations are float32. The tensors."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: (torch.randn(shape, generator=generator) * 0.1).to(
            torch.float32 if any(part in name for part in ("lambda", "router", "act_fn", "mhc")) else dtype
        )
        for name, shape in unknown_shapes(tied).items()
    }
    names = list(tensors)
    parts = [names[i::shards] for i in range(shards)]
    files = [
        f"model-{i + 1:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors" for i in range(shards)
    ]
    for file, part in zip(files, parts, strict=True):
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    if shards > 1:
        weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": tied}))
    return tensors


def linears(name: str, weight: Tensor) -> dict[str, Tensor]:
    """The Linears that a weight is written as, each with its matrix [out, in]: one, or those of every expert."""
    stem, _, kind = name.removesuffix(".weight").rpartition(".")
    if not stem.endswith(".experts") or weight.ndim != 3:
        return {f"{stem}.{kind}": weight}
    projections = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else ["down_proj"]
    return {
        f"{stem}.{number}.{projection}": matrix
        for number, expert in enumerate(weight)
        for projection, matrix in zip(projections, expert.chunk(len(projections)), strict=True)
    }
