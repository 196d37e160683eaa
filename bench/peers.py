"""Peers: implementations of attention to compare, each with its input, its operation count and its tolerance."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad

from diffquant.attention import BACKENDS, attend
from diffquant.attention.backends.composed import flashdiff1, flashdiff2
from diffquant.attention.naive import naive
from diffquant.benchmarks import roofline
from diffquant.benchmarks.roofline import Count
from diffquant.benchmarks.workloads import (
    CallWithState,
    Workload,
    get_peer_state,
    make_differential_call,
    make_transformer_call,
)
from diffquant.family.call import AttentionCall
from diffquant.family.norm import PairNorm
from diffquant.recipe.scheme import FULL, Scheme

BASELINE = "Transformer, SDPA flash"
ROW_8 = Scheme.parse("8", "row")
ROW_SHIFT_8 = Scheme.parse("8:row:shift")
# Epsilon of DiffLlama's norm, and of the same norm in the call for `naive`.
_EPS = 1e-5
Attention = Callable[[AttentionCall], Tensor]


@dataclass(frozen=True)
class Peer:
    """An implementation of attention that the bench compares with others.

    Attributes:
        attention: function to time.
        count: returns the operations of a workload, and the bytes that they read and write.
        make: makes the call that `attention` computes, for a workload and a device.
        logits: scheme of its logits, which backend `naive` also uses when results are compared.
        tolerance: largest allowed relative error against `naive`, for peers that quantize; by default the dtype's.
        missing: returns the reason why the peer cannot run a call, or None if it can.
        facts: returns further numbers about a call, by name, for `BenchCell.facts`.
    """

    attention: Attention
    count: Callable[[Workload], Count]
    make: Callable[[Workload, str], AttentionCall] = make_differential_call
    logits: Scheme = FULL
    tolerance: float | None = None
    missing: Callable[[AttentionCall], str | None] = lambda _: None
    facts: Callable[[AttentionCall], dict[str, float]] = lambda _: {}


def _sdpa(
    kind: str,
    count: Callable[[Workload], Count],
    make: Callable[[Workload, str], AttentionCall] = make_differential_call,
    composed: Attention = flashdiff1,
) -> Peer:
    """Make a peer of torch's attention with one of its backends: "FLASH", "CUDNN" or "EFFICIENT"."""

    def attention(call: AttentionCall) -> Tensor:
        with sdpa_kernel(SDPBackend.__members__[f"{kind}_ATTENTION"]):
            return composed(call)

    return Peer(attention, count, make, missing=_flash_widths if kind == "FLASH" else _only_cuda)


def _ours(name: str) -> Attention:
    def attention(call: AttentionCall) -> Tensor:
        return BACKENDS[name].compute(call)

    return attention


def _reason_of(name: str) -> Callable[[AttentionCall], str | None]:
    def missing(call: AttentionCall) -> str | None:
        try:
            return BACKENDS[name].refuses(call)
        except ImportError as error:
            return f"the kernel cannot be imported: {error}"

    return missing


def _kernel(
    name: str,
    count: Callable[[Workload], Count] = roofline.count_fused_call,
    make: Callable[[Workload, str], AttentionCall] = make_differential_call,
    tolerance: float | None = None,
) -> Peer:
    """Make a peer of a backend of diffquant, which may not be installed or not support a call."""
    return Peer(_ours(name), count, make, tolerance=tolerance, missing=_reason_of(name))


def _simulate_logits(scheme: Scheme) -> Attention:
    return lambda call: attend(replace(call, logits=scheme))


def _rounded_eagerly(call: AttentionCall) -> Tensor:
    return naive(replace(call, logits=ROW_8))


def _padded_call(work: Workload, device: str) -> AttentionCall:
    """Make a call with queries and keys padded to the width of values, as a flash kernel needs to compute a map."""
    call = make_differential_call(work, device)
    padding = (0, work.model.value_width - work.model.width)
    k = [pad(x, padding) for x in call.k]
    return replace(call, q=[pad(x, padding) for x in call.q], k=[k[0]] * 2 if call.k[0] is call.k[1] else k)


def _only_cuda(call: AttentionCall) -> str | None:
    return None if call.v.is_cuda else "it runs only on CUDA"


def _flash_widths(call: AttentionCall) -> str | None:
    return None if call.v.dtype != torch.float32 or not call.v.is_cuda else "flash attention on CUDA needs 16 bits"


def _flex(call: AttentionCall) -> Tensor:
    """Compute attention by compiled FlexAttention, with a call per map; it supports a dv that differs from d."""
    mask = _causal_block(call.query_count, call.v.shape[2], str(call.v.device))
    outputs: list[Tensor] = [
        _compiled_flex()(q, k, call.v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
        for q, k in zip(call.q, call.k, strict=True)
    ]
    return outputs[0] if call.lam is None else outputs[0] - call.lam.to(outputs[0].dtype) * outputs[1]


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


@cache
def _causal_block(queries: int, keys: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(
        lambda _batch, _head, i, j: j <= i + (keys - queries), None, None, queries, keys, device=device
    )


class _Projected(nn.Module):
    """Replaces a projection: returns a given tensor, or its input if there is none."""

    def __init__(self, rows: Tensor | None = None) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        return x if self.rows is None else self.rows


def _diffllama_call(implementation: str, work: Workload, device: str) -> AttentionCall:
    """Make a V1 call with the λ and norm of DiffLlama's first layer."""
    call = make_differential_call(work, device)
    if work.model.shares_keys:
        return call
    from transformers import DiffLlamaConfig
    from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention

    model = work.model
    config = DiffLlamaConfig(
        hidden_size=2 * model.pairs * model.width,
        num_attention_heads=2 * model.pairs,
        num_key_value_heads=2 * model.kv_pairs,
        head_dim=model.width,
        rms_norm_eps=_EPS,
        attn_implementation=implementation,
    )
    module = DiffLlamaAttention(config, layer_idx=0).to(device, work.torch_dtype).eval()
    halves = torch.cat(tuple(call.v.chunk(2, -1)), 1)
    module.q_proj, module.k_proj, module.v_proj = (
        _Projected(_rows(heads)) for heads in (torch.cat(tuple(call.q), 1), torch.cat(tuple(call.k), 1), halves)
    )
    module.o_proj = _Projected()
    for name in ("lambda_q1", "lambda_q2"):
        getattr(module, name).data.zero_()  # both exponentials are 1, and λ is λ_init
    mask = None
    if implementation == "eager" and work.queries > 1:
        seen = call.mask.dense(work.queries, work.keys, call.v.device)
        mask = torch.zeros(1, 1, work.queries, work.keys, dtype=work.torch_dtype, device=device)
        mask = mask if seen is None else mask.masked_fill_(~seen, torch.finfo(work.torch_dtype).min)
    ones = torch.ones(1, 1, model.width, dtype=work.torch_dtype, device=device)
    hidden = torch.empty(work.batch, work.queries, 1, device=device)
    rotary = (ones, torch.zeros_like(ones))
    lam = torch.tensor(float(module.lambda_init), device=device)
    post = PairNorm(_EPS, factor=1 - float(module.lambda_init))

    def run() -> Tensor:
        rows: Tensor = module(hidden, position_embeddings=rotary, attention_mask=mask)[0]
        return torch.unflatten(rows, -1, (model.pairs, -1)).transpose(1, 2)

    return CallWithState(call.q, call.k, call.v, lam, scale=call.scale, mask=call.mask, post=post, state=run)


def _diffllama(call: AttentionCall) -> Tensor:
    """Run the call's DiffLlama module; return its output [B, h, T, dv] after the norm."""
    output: Tensor = get_peer_state(call)()
    return output


def _diffllama_missing(call: AttentionCall) -> str | None:
    """Return why DiffLlama cannot run a call, or None if it can."""
    return None if isinstance(call, CallWithState) else "transformers does not have DIFF V2"


def _rows(heads: Tensor) -> Tensor:
    """Concatenate heads: [B, H, T, d] -> [B, T, H·d]."""
    return heads.transpose(1, 2).flatten(2)


PEERS: dict[str, Peer] = {
    BASELINE: _sdpa("FLASH", roofline.count_transformer, make_transformer_call),
    "Transformer, SDPA cuDNN": _sdpa("CUDNN", roofline.count_transformer, make_transformer_call),
    "Transformer, flash-attn": _kernel("flash_attn", roofline.count_transformer, make_transformer_call),
    "Transformer, flash-attn-4": _kernel("flash_attn_4", roofline.count_transformer, make_transformer_call),
    "DIFF, eager": Peer(_ours("naive"), roofline.count_eager),
    "FlashDiffAttn_1": Peer(_ours("flashdiff1"), roofline.count_call_per_map),
    "FlashDiffAttn_1, SDPA mem-efficient": _sdpa("EFFICIENT", roofline.count_call_per_map),
    "FlashDiffAttn_1, SDPA cuDNN": _sdpa("CUDNN", roofline.count_call_per_map),
    "FlashDiffAttn_1, SDPA flash, keys padded": _sdpa("FLASH", roofline.count_call_per_map, _padded_call),
    "FlashDiffAttn_1, FlexAttention": Peer(_flex, roofline.count_call_per_map, missing=_only_cuda),
    "FlashDiffAttn_1, flash-attn-4": _kernel("flash_attn_4", roofline.count_call_per_map),
    "FlashDiffAttn_2": Peer(_ours("flashdiff2"), roofline.count_call_per_half),
    "FlashDiffAttn_2, SDPA flash": _sdpa("FLASH", roofline.count_call_per_half, composed=flashdiff2),
    "FlashDiffAttn_2, SDPA cuDNN": _sdpa("CUDNN", roofline.count_call_per_half, composed=flashdiff2),
    "FlashDiffAttn_2, flash-attn": _kernel("flash_attn", roofline.count_call_per_half),
    **{
        f"transformers' DiffLlama, {how}": Peer(
            _diffllama, count, partial(_diffllama_call, how), missing=_diffllama_missing
        )
        for how, count in (("eager", roofline.count_eager_halves), ("sdpa", roofline.count_call_per_half))
    },
    "DIFF, fused": _kernel("triton"),
    "DIFF, fused, int8 QK": _kernel("triton-int8", tolerance=0.05),
    "DIFF, fused, int8 QK, fp8 PV": _kernel("triton-fp8", tolerance=0.1),
    "DIFF, fused, specialized": _kernel("triton-specialized"),
    "DIFF, fused, int8 QK, fp8 PV, specialized": _kernel("triton-fp8-specialized", tolerance=0.1),
    "DIFF, simulated logits 8:row, eager": Peer(_rounded_eagerly, roofline.count_eager, logits=ROW_8),
    **{
        f"DIFF, simulated logits {scheme}": Peer(
            _simulate_logits(scheme), roofline.count_simulated_logits, logits=scheme
        )
        for scheme in (ROW_8, ROW_SHIFT_8)
    },
}
