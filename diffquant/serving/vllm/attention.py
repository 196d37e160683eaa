"""Differential attention on vLLM's layers: its projections, rotary embedding, paged cache and attention kernels."""

import math
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding
from vllm.config import CacheConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.utils import extract_layer_index

from diffquant.family.norm import LAMBDA_VECTORS
from diffquant.quantization.engine_folder import require_vllm_rope
from diffquant.quantization.modeling_diffquant import DiffAttention, DiffConfig, PlainHeads
from diffquant.serving.vllm.config import heads_of_rank


class ServedAttention(DiffAttention):
    """Attention of the head pairs that one tensor-parallel rank computes, with both maps and λ of each pair.

    vLLM computes the maps' outputs. Their difference and the norm after it are computed by the parent class, which
    exported folders contain as their modelling file.
    """

    def __init__(
        self, config: DiffConfig, cache_config: CacheConfig | None, quant_config: QuantizationConfig | None, prefix: str
    ) -> None:
        # The parent's __init__ would build layers for transformers.
        nn.Module.__init__(self)
        self.spec = spec = (config.diff_model or {})["attention"]
        self.heads = heads = heads_of_rank(spec, get_tensor_model_parallel_world_size())
        whole, width, bias = PlainHeads(spec), config.hidden_size, config.attention_bias
        noises = whole.pairs // whole.sharing if whole.has_noise else 0
        self.qkv_proj = QKVParallelLinear(
            width,
            whole.key_width,
            whole.pairs + noises,
            whole.kv_pairs // whole.repeats * whole.key_maps,
            bias=bias,
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
            return_bias=False,
            v_head_size=whole.value_width // whole.key_maps,
        )
        made_of = {"bias": False, "quant_config": quant_config, "return_bias": False}
        output = RowParallelLinear(
            whole.pairs * whole.value_width, width, prefix=f"{prefix}.{spec['output']}", **made_of | {"bias": bias}
        )
        self.add_module(spec["output"], output)
        if spec["lam"] == "exp":
            for name in LAMBDA_VECTORS:
                vector = torch.zeros(whole.key_width, dtype=torch.float32)
                self.register_parameter(name, nn.Parameter(vector, requires_grad=False))
        elif whole.has_noise:
            gates = whole.pairs * (2 if spec["lam"] == "two-gates" else 1)
            self.lambda_proj = ColumnParallelLinear(width, gates, prefix=f"{prefix}.lambda_proj", **made_of)
        if spec["output_gate"]:
            channels = whole.pairs * whole.value_width
            self.output_gate_proj = ColumnParallelLinear(
                width, channels, prefix=f"{prefix}.output_gate_proj", **made_of
            )
        if spec["post_norm"] == "affine":
            self.subln = LlamaRMSNorm(whole.value_width, spec["post_norm_eps"])
        self.lam_init = 0.8 - 0.6 * math.exp(-0.3 * (extract_layer_index(prefix) + spec["lam_init_offset"]))
        self.rotary_emb = None
        if spec["rope"] != "none":
            settings = _rotary_settings(config, whole.key_width)
            require_vllm_rope(settings, spec["rope"])
            self.rotary_emb = get_rope(
                whole.key_width,
                max_position=config.max_position_embeddings,
                rope_parameters=settings,
                is_neox_style=spec["rope"] == "half",
            )
        kv_heads = heads.kv_pairs * heads.cuts
        self.attn = Attention(
            kv_heads * heads.group,
            heads.width,
            heads.key_width**-0.5,
            num_kv_heads=kv_heads,
            cache_config=cache_config,
            quant_config=quant_config,
            prefix=f"{prefix}.attn",
        )

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """Compute the output [T, D] for the tokens [T, D] of all requests at their positions [T]."""
        qkv = self.qkv_proj
        heights = [qkv.num_heads * qkv.head_size, qkv.num_kv_heads * qkv.head_size, qkv.num_kv_heads * qkv.v_head_size]
        q, k, v = qkv(hidden_states).split(heights, -1)
        if self.rotary_emb is not None:
            q, k = self.rotary_emb(positions, q, k)
        plain = (
            self.heads.queries(q[None], NO_ROTATION),
            self.heads.keys(k[None], NO_ROTATION),
            self.heads.values(v[None]),
        )
        heads = self.attn(*(x[0].transpose(0, 1).flatten(1) for x in plain))
        signal, noise = self.heads.outputs(heads[None])
        noise = None if noise is None else noise[0]
        out = self._normalize(self._difference(signal[0], noise, hidden_states)).flatten(-2)
        if self.spec["output_gate"]:
            out = out * self.output_gate_proj(hidden_states).sigmoid()
        projected: Tensor = getattr(self, self.spec["output"])(out)
        return projected


def _rotary_settings(config: DiffConfig, width: int) -> dict[str, Any]:
    """Return the rotary settings with which vLLM rotates heads of a width as transformers does."""
    stated = {name: value for name, value in (config.rope_parameters or {}).items() if value is not None}
    if "factor" in stated:
        # vLLM would read an integer as a list of factors.
        stated["factor"] = float(stated["factor"])
    if stated["rope_type"] == "longrope":
        # Without these entries vLLM computes the attention factor from the positions, whatever the settings are.
        heads = copy(config)
        heads.head_dim = width
        scaling = LlamaRotaryEmbedding(heads).attention_scaling
        stated |= {"short_mscale": scaling, "long_mscale": scaling}
    return stated


# No rotation is passed on: heads are rotated right after the projection, before the heads of a map are repeated.
NO_ROTATION: Any = None
