"""Differential attention of many queries with Q·Kᵀ in int8, and P·V in half precision or in e4m3."""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from diffquant.errors import UsageError
from diffquant.family.norm import PairNorm
from diffquant.kernels import configs
from diffquant.kernels.arguments import Visibility, attention_shape, empty_output, refused_device, refused_widths
from diffquant.kernels.attention.attend_int8 import attend_int8
from diffquant.kernels.attention.quantize_qkv import QuantizedKV, quantize_qkv
from diffquant.kernels.configs import AttentionTile, choose, device_class
from diffquant.kernels.descriptors import allow_descriptors, describable
from diffquant.kernels.strides import same_strides

# 128 keys a step halve the rescaling of 64, and softmax is what 8-bit attention spends most on.
TILES = {
    "prefill_int8/sm_90/64": AttentionTile(128, 128, 8, 2),
    "prefill_int8/sm_90/128": AttentionTile(128, 128, 8, 2),
    "prefill_int8/sm_80/64": AttentionTile(128, 64, 8, 2),
    "prefill_int8/sm_80/128": AttentionTile(128, 64, 8, 2),
}
PV_TYPES = ("fp16", "fp8")


def prefill_int8(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Tensor,
    lam: Tensor | None,
    *,
    scale: float,
    seen: Visibility,
    post: PairNorm | None = None,
    pv: str = "fp16",
) -> Tensor:
    """(softmax(Q1·K1ᵀ·scale) - λ·softmax(Q2·K2ᵀ·scale))·V with Q and K in 8 bits, or all three.

    Args:
        q: one [B, h, T, d] a map, one or two maps, float16 or bfloat16.
        k: one [B, h_kv, S, d] a map; the same tensor twice where the maps share keys (V2).
        v: [B, h_kv, S, dv].
        lam: λ, broadcastable to [B, h, T, 1]; None with one map.
        scale: what multiplies Q·Kᵀ.
        seen: which keys a query sees; a query that sees none gives 0.
        post: the per-pair norm; None for none.
        pv: "fp16" multiplies P and V in V's own type, "fp8" in e4m3.

    Returns:
        [B, h, T, dv] in v's dtype, its memory [B, T, h, dv].

    Raises:
        UsageError: arguments disagree, or the device cannot do what is asked.
    """
    attention_shape(q, k, v, lam, seen, post)
    reason = _unsupported(q, v, pv)
    if reason:
        raise UsageError(f"prefill_int8: {reason}")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*q, *k, v)):
        raise UsageError("prefill_int8 has no backward pass; call it under torch.no_grad()")
    norm = post or PairNorm(0.0)
    return _op(
        q[0], q[1] if len(q) == 2 else None, k[0], None if k[-1] is k[0] else k[1], v, lam, seen.starts, seen.ends,
        norm.weight, scale, seen.causal, seen.window, post is not None, norm.eps, norm.factor, pv,
    )  # fmt: skip


def refused(q: Sequence[Tensor], v: Tensor, *, pv: str = "fp16") -> str | None:
    """Why `prefill_int8` cannot serve these tensors, or None."""
    return refused_device(v.device) or _unsupported(q, v, pv)


def _unsupported(q: Sequence[Tensor], v: Tensor, pv: str) -> str | None:
    if pv not in PV_TYPES:
        return f"P·V in {pv!r} is unknown; known are {', '.join(PV_TYPES)}"
    if pv == "fp8" and configs.capability(v.device) < (8, 9):
        return "P·V in fp8 needs compute capability 8.9 (Ada, Hopper) or newer; use pv='fp16'"
    return refused_widths(q[0], v)


@torch.library.custom_op("diffquant::prefill_int8", mutates_args=())
def _op(
    q1: Tensor,
    q2: Tensor | None,
    k1: Tensor,
    k2: Tensor | None,
    v: Tensor,
    lam: Tensor | None,
    starts: Tensor | None,
    ends: Tensor | None,
    weight: Tensor | None,
    scale: float,
    causal: bool,
    window: int | None,
    normed: bool,
    eps: float,
    factor: float,
    pv: str,
) -> Tensor:
    """`prefill_int8` without its data classes; k2 None where the maps share keys (V2)."""
    batch, heads, length, width = q1.shape
    kv_heads, keys, value_width = v.shape[1:]
    out = empty_output(q1, value_width)
    if out.numel() == 0:
        return out
    if keys == 0:
        return out.zero_()
    here = device_class(v.device)
    tile = choose(TILES, f"prefill_int8/{here}/{width}")
    q = same_strides(q1) if q2 is None else same_strides(q1, q2)
    k = same_strides(k1) if k2 is None else same_strides(k1, k2)
    (v,) = same_strides(v)
    packed = len(q) // len(k)
    lam = None if lam is None else lam.float().expand(batch, heads, length, 1)
    seen = Visibility(causal, window, starts, ends)
    with torch.cuda.device_of(v):
        codes = quantize_qkv(q, k, v, seen, scale, tile_rows=tile.queries, block=tile.keys, values=pv == "fp8")
        described = here == "sm_90"
        if described and not describable(v):
            v = v.clone(memory_format=torch.contiguous_format)
        operands = _described(codes, v, tile) if described else (codes.q, codes.k, v if codes.v is None else codes.v)
        if described and codes.v is None:
            allow_descriptors()
        attend_int8[(triton.cdiv(length * packed, tile.queries), batch * heads)](
            *operands, codes.q_scale, codes.k_scale, codes.v_scale, lam, starts, ends, weight,
            out, out.view(torch.float16), v.stride()[:3], None if lam is None else lam.stride()[:3], out.stride()[:3],
            heads, heads // kv_heads, length, keys, codes.q.shape[3], codes.k.shape[3], window, eps, factor,
            CAUSAL=causal, NORM=normed, MAPS=len(k), PACK=packed, D=width, DV=value_width, FP8=pv == "fp8",
            DESCRIBED=described, PINNED=described and not triton.knobs.runtime.interpret,
            BM=tile.queries, BN=tile.keys,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
        )  # fmt: skip
    return out


@_op.register_fake
def _(q1: Tensor, q2: Tensor | None, k1: Tensor, k2: Tensor | None, v: Tensor, *rest: object) -> Tensor:
    return empty_output(q1, v.shape[-1])


def _described(codes: QuantizedKV, v: Tensor, tile: AttentionTile) -> tuple[TensorDescriptor | Tensor, ...]:
    """Descriptors of the codes, each tensor as one matrix; 16-bit V as it is."""
    width = codes.q.shape[-1]
    q = TensorDescriptor.from_tensor(codes.q.flatten(0, 3), [tile.queries, width])
    k = TensorDescriptor.from_tensor(codes.k.flatten(0, 3), [tile.keys, width])
    if codes.v is None:
        return q, k, v
    return q, k, TensorDescriptor.from_tensor(codes.v.flatten(0, 2), [min(v.shape[-1], 128), tile.keys])
