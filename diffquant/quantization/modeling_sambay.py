# SPDX-License-Identifier: Apache-2.0
"""SambaY, the architecture of Phi-4-mini-flash-reasoning, for transformers. It does not need diffquant.

The lower half of the layers alternates Mamba and windowed differential attention. The next two are a Mamba layer and
the only attention that sees all tokens. The layers above alternate gated memory units, which gate the last Mamba
layer's output, and cross attention, which uses that attention's keys and values. Each map of differential attention is
an ordinary softmax: softmax(Q1·K1ᵀ)·V - λ·softmax(Q2·K2ᵀ)·V. There are no positions, so order comes from Mamba alone.

B is the batch, T the number of new tokens, S that of cached and new ones, E the number of Mamba's channels, N the width
of a channel's state, and W the number of tokens that a convolution covers.

Sources: arXiv 2507.06607; arXiv 2410.05258, section 2; arXiv 2312.00752, section 3.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu, softplus
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaPreTrainedModel, LlamaRMSNorm
from transformers.utils import logging
from transformers.utils.output_capturing import capture_outputs

MODEL_TYPE = "phi4flash"
_VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
# transformers 5.24 calls `cache` what was `past_key_values`.
_CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
# Tokens per step of the scan, so that its memory does not grow with the sequence.
_BLOCK_TOKENS = 64
_NOT_HERE = "{} of the recipe are not applied here: this model keeps them in {}; diffquant.load applies them"
Pair = tuple[Tensor, Tensor]
MaskAndKept = tuple[Tensor | None, int]


class SambaYConfig(PreTrainedConfig):
    """A model's sizes, named as in Phi-4-mini-flash-reasoning's config.json."""

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012

    vocab_size: int = 200064
    hidden_size: int = 2560
    intermediate_size: int = 10240
    num_hidden_layers: int = 32
    num_attention_heads: int = 40
    num_key_value_heads: int = 20
    head_dim: int = 64
    hidden_act: str = "silu"
    max_position_embeddings: int = 262144
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    sliding_window: int | None = 512
    mamba_d_state: int = 16
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_dt_rank: int = 160
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = True


class LayerStorage:
    """What a layer keeps of earlier tokens: keys and values, or Mamba's newest inputs [B, W - 1, E] and state."""

    is_compileable = is_croppable = is_sliding = supports_early_init = False

    def __init__(self) -> None:
        self.kept: Pair | None = None

    def keep(self, first: Tensor, second: Tensor) -> None:
        # Cloned, since a slice would keep the memory of a whole prompt.
        self.kept = first.clone(), second.clone()

    def reset(self) -> None:
        self.kept = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change(lambda x: x[indices])

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.kept is not None:
            self.kept = change(self.kept[0]), change(self.kept[1])


class SambaYCache(Cache):
    """Storage of the layers that keep anything: Mamba, windowed attention, and last the attention that sees all."""

    def __init__(self, config: SambaYConfig) -> None:
        super().__init__(layers=[LayerStorage() for _ in range(config.num_hidden_layers // 2 + 2)])

    def get_seq_length(self, layer_idx: int = -1) -> int:
        """Return the number of tokens whose keys an attention layer keeps; that of layer -1 keeps all."""
        kept = self.layers[layer_idx or -1].kept
        return 0 if kept is None else kept[0].shape[2]


class Mamba(nn.Module):
    """Mamba-1: a causal convolution, then a recurrence whose steps and couplings depend on the token."""

    def __init__(self, config: SambaYConfig) -> None:
        super().__init__()
        inner, rank, states = config.mamba_expand * config.hidden_size, config.mamba_dt_rank, config.mamba_d_state
        self.parts = [rank, states, states]
        self.in_proj = nn.Linear(config.hidden_size, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, config.mamba_d_conv, groups=inner)
        self.x_proj = nn.Linear(inner, sum(self.parts), bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=False)
        self.A_log = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))

    def forward(self, x: Tensor, valid: Tensor, storage: LayerStorage | None) -> Pair:
        """Return the output [B, T, D] and the recurrence's output before its gate [B, T, E].

        Padding, False in valid [B, T], is moved behind a sequence's tokens, where it changes neither inputs nor state.
        """
        u, gate = self.in_proj(x).chunk(2, -1)
        order = (~valid).sort(dim=1, stable=True).indices[..., None]
        memory = self._recur(u.take_along_dim(order, 1), valid.sum(1, keepdim=True), storage)
        memory = memory.take_along_dim(order.argsort(1), 1)
        return self.out_proj(memory * silu(gate)), memory

    def _recur(self, u: Tensor, counts: Tensor, storage: LayerStorage | None) -> Tensor:
        """Run convolution and recurrence over u [B, T, E], of which counts [B, 1] tokens are valid."""
        batch, length, inner = u.shape
        wide, width = torch.promote_types(u.dtype, torch.float32), self.conv1d.kernel_size[0] - 1
        if storage is None or storage.kept is None:
            earlier, state = u.new_zeros(batch, width, inner), u.new_zeros(batch, *self.A_log.shape, dtype=wide)
        else:
            earlier, state = storage.kept
        inputs = torch.cat([earlier, u], 1)
        convolved = silu(self.conv1d(inputs.mT).mT)
        low, into, out_of = self.x_proj(convolved).split(self.parts, -1)
        step = softplus(self.dt_proj(low).to(wide))
        places = torch.arange(length + width, device=u.device)
        step = step * (places[:length] < counts)[..., None]
        y, state = selective_scan(convolved.to(wide), step, -self.A_log.to(wide).exp(), into, out_of, state)
        if storage is not None:
            storage.keep(inputs.take_along_dim((counts + places[:width])[..., None], 1), state)
        return (y + self.D.to(wide) * convolved).to(u.dtype)


def selective_scan(u: Tensor, step: Tensor, a: Tensor, into: Tensor, out_of: Tensor, state: Tensor) -> Pair:
    """Compute h ← exp(Δ·A)∘h + Δ·B·u and y = C·h token by token; return y [B, T, E] and the last h [B, E, N].

    u and Δ are [B, T, E], A is [E, N], B and C are [B, T, N]. Where Δ is 0, the state does not change.
    """
    outputs = []
    for inputs, steps, b, c in zip(*(x.split(_BLOCK_TOKENS, 1) for x in (u, step, into, out_of)), strict=True):
        decay, fed = torch.exp(steps[..., None] * a), (steps * inputs)[..., None] * b[:, :, None]
        states = []
        for token in range(inputs.shape[1]):
            state = decay[:, token] * state + fed[:, token]
            states.append(state)
        outputs.append(torch.einsum("bten,btn->bte", torch.stack(states, 1), c.to(u.dtype)))
    return torch.cat(outputs, 1), state


class GatedMemory(nn.Module):
    """A gated memory unit: out_proj(memory · silu(in_proj(x)))."""

    def __init__(self, config: SambaYConfig) -> None:
        super().__init__()
        inner = config.mamba_expand * config.hidden_size
        self.in_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.out_proj(memory * silu(self.in_proj(x)))


def make_window_mask(valid: Tensor, has_padding: bool, length: int, window: int | None) -> MaskAndKept:
    """Return which of S keys T = `length` new tokens see, and how many of the newest keys later tokens may see.

    The mask is bool [B or 1, 1, T, S], or None if each token sees all keys up to its own. A window does not count
    padding, where valid [B, S] is False.
    """
    keys = valid.shape[1]
    kept = keys if window is None else min(keys, window - 1)
    if not has_padding and length in (1, keys) and (window is None or keys <= window):
        return None, kept
    positions, places = torch.arange(keys, device=valid.device), valid.cumsum(1)
    new = positions[keys - length :, None]
    mask = (positions <= new) & valid[:, None]
    if window is not None:
        mask &= places[:, -length:, None] - places[:, None] < window
    if window is not None and has_padding:
        newest = valid & (places > places[:, -1:] - (window - 1))
        kept = int((keys - newest.int().argmax(1)).max())
    # Softmax needs at least one key, even for padding.
    return (mask | (positions == new))[:, None], kept


class DiffMaps(nn.Module):
    """Both maps of each pair of adjacent heads, λ, and the norm of their difference."""

    def __init__(self, config: SambaYConfig, layer: int) -> None:
        super().__init__()
        for name in _VECTORS:
            # Initialized as in the paper; vectors of zeros would have no gradient.
            self.register_parameter(name, nn.Parameter(0.1 * torch.randn(config.head_dim)))
        self.subln = LlamaRMSNorm(2 * config.head_dim, 1e-5)
        self.lam_init = 0.8 - 0.6 * math.exp(-0.3 * layer)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Return [B, T, 2dP] for queries [B, 2P, T, d], keys [B, 2K, S, d] and values [B, K, S, 2d]."""
        own: dict[str, Any] = {"attn_mask": mask, "is_causal": mask is None and q.shape[2] > 1, "enable_gqa": True}
        signal = scaled_dot_product_attention(q[:, 0::2], k[:, 0::2], v, **own).float()
        noise = scaled_dot_product_attention(q[:, 1::2], k[:, 1::2], v, **own).float()
        q1, k1, q2, k2 = (getattr(self, name).float() for name in _VECTORS)
        # Under autocast, `@` would compute in bfloat16.
        lam = (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.lam_init
        pairs = self.subln(signal - lam * noise) * (1 - self.lam_init)
        return pairs.to(v.dtype).transpose(1, 2).flatten(2)


class SambaYAttention(nn.Module):
    """Windowed, full or cross attention; the latter has no projection of keys and values."""

    def __init__(self, config: SambaYConfig, layer: int, is_cross: bool) -> None:
        super().__init__()
        width = config.head_dim
        queries, keys = config.num_attention_heads * width, config.num_key_value_heads * width
        # Rows and a head's width of queries, keys and values, which are as wide as the two keys of a pair.
        self.rows, self.widths = [queries, keys, keys], [width, width, 2 * width]
        if is_cross:
            self.rows, self.widths = self.rows[:1], self.widths[:1]
        self.Wqkv = nn.Linear(config.hidden_size, sum(self.rows))
        self.out_proj = nn.Linear(queries, config.hidden_size)
        self.inner_cross_attn = DiffMaps(config, layer)

    def forward(
        self, x: Tensor, window_mask: MaskAndKept, shared: Pair, storage: LayerStorage | None
    ) -> tuple[Tensor, Pair]:
        """Return the output [B, T, D], and the keys and values used, which cross attention gets from a lower layer."""
        mask, kept = window_mask
        parts = zip(self.Wqkv(x).split(self.rows, -1), self.widths, strict=True)
        q, *own = (rows.unflatten(-1, (-1, width)).transpose(1, 2) for rows, width in parts)
        if own and storage is not None:
            if storage.kept is not None:
                own = [torch.cat(pair, 2) for pair in zip(storage.kept, own, strict=True)]
            storage.keep(*(part[:, :, part.shape[2] - kept :] for part in own))
        keys, values = own or shared
        return self.out_proj(self.inner_cross_attn(q, keys, values, mask)), (keys, values)


class SambaYMLP(nn.Module):
    """A gated MLP with gate and up projection in one weight, the gate first."""

    def __init__(self, config: SambaYConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.fc1(x).chunk(2, -1)
        return self.fc2(value * self.act_fn(gate))


class SambaYLayer(nn.Module):
    """A token mixer and an MLP, each added to the residual stream, which is in at least float32."""

    def __init__(self, config: SambaYConfig, layer: int) -> None:
        super().__init__()
        middle = config.num_hidden_layers // 2
        self.layer, self.is_windowed = layer, layer < middle
        if layer % 2:
            self.attn = SambaYAttention(config, layer, is_cross=layer > middle + 1)
        else:
            self.attn = Mamba(config) if layer <= middle else GatedMemory(config)
        self.mlp = SambaYMLP(config)
        self.input_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        shared: Pair,
        valid: Tensor,
        masks: list[MaskAndKept],
        cache: SambaYCache | None,
    ) -> tuple[Tensor, Tensor, Pair]:
        storage = cache.layers[self.layer] if cache is not None and self.layer < len(cache.layers) else None
        normed = normalize(self.input_layernorm, x)
        if isinstance(self.attn, Mamba):
            mixed, memory = self.attn(normed, valid, storage)
        elif isinstance(self.attn, GatedMemory):
            mixed = self.attn(normed, memory)
        else:
            mixed, shared = self.attn(normed, masks[self.is_windowed], shared, storage)
        x = x + mixed
        return x + self.mlp(normalize(self.post_attention_layernorm, x)), memory, shared


def normalize(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """Apply a norm to the residual stream [B, T, D]; the result has the norm's dtype."""
    return norm(x.to(norm.weight.dtype))


class SambaYPreTrainedModel(LlamaPreTrainedModel):
    """What both models declare: they compute attention themselves and cannot go back to earlier tokens."""

    config_class = SambaYConfig
    _is_stateful = True
    _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = _can_compile_fullgraph = False
    supports_gradient_checkpointing = False
    _no_split_modules = ["SambaYLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": SambaYLayer}  # noqa: RUF012
    _keep_in_fp32_modules_strict = ["A_log", "attn.D", "lambda_", "subln"]  # noqa: RUF012

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        # So `generate` makes no cache, and takes that of the first output.
        return False


class SambaYModel(SambaYPreTrainedModel):
    """The decoder without its output head."""

    def __init__(self, config: SambaYConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList([SambaYLayer(config, layer) for layer in range(config.num_hidden_layers)])
        self.final_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: SambaYCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cache: SambaYCache | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = past_key_values if cache is None else cache
        if cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = SambaYCache(self.config)
        if cache is not None and not isinstance(cache, SambaYCache):
            raise ValueError(f"{type(cache).__name__} does not hold Mamba's states: pass a SambaYCache, or none")
        length, earlier = x.shape[1], 0 if cache is None else cache.get_seq_length()
        is_packed = attention_mask is None and position_ids is not None and (position_ids.diff(dim=-1) != 1).any()
        if is_packed or (attention_mask is not None and attention_mask.shape != (len(x), earlier + length)):
            raise ValueError(
                "Mamba reads tokens one after the other: pass sequences as rows of a batch, and an attention_mask "
                "[batch, tokens] over cached and new tokens"
            )
        has_padding = attention_mask is not None and not attention_mask.all()
        valid = attention_mask.bool() if has_padding else x.new_ones(len(x), earlier + length, dtype=torch.bool)
        near = length + (0 if cache is None else cache.get_seq_length(1))
        windows = (earlier + length, None), (near, self.config.sliding_window)
        masks = [make_window_mask(valid[:, -keys:], has_padding, length, window) for keys, window in windows]
        x, memory, shared = x.to(torch.promote_types(x.dtype, torch.float32)), None, None
        for layer in self.layers:
            x, memory, shared = layer(x, memory, shared, valid[:, -length:], masks, cache)
        x = normalize(self.final_layernorm, x)
        return BaseModelOutputWithPast(last_hidden_state=x, **{_CACHE: cache})


class SambaYForCausalLM(SambaYPreTrainedModel, LlamaForCausalLM):
    """A causal language model with Mamba, gated memory units and differential attention."""

    def __init__(self, config: SambaYConfig) -> None:
        super(LlamaForCausalLM, self).__init__(config)
        self.model = SambaYModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
        recipe = (getattr(config, "diffquant_config", None) or {}).get("recipe", {})
        asked = {name: recipe[name] for name in ("k", "v", "logits", "qk", "p", "pv") if recipe.get(name, "16") != "16"}
        if asked:
            schemes = ", ".join(f"{name} {scheme}" for name, scheme in asked.items())
            dtype = str(self.dtype).removeprefix("torch.")
            logging.get_logger(__name__).warning(_NOT_HERE.format(schemes, dtype))
