"""Differential attention of many queries with Q·Kᵀ in int8, and P·V in half precision or in e4m3."""

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from diffquant.errors import UsageError
from diffquant.family.call import AttentionCall
from diffquant.kernels.arguments import call_refusal, widths_refusal
from diffquant.kernels.attention.attend_int8 import attend_int8
from diffquant.kernels.attention.operator import Operands, as_operator
from diffquant.kernels.attention.quantize_qkv import QuantizedKV, quantize_qkv
from diffquant.kernels.configs import AttentionTile, choose
from diffquant.kernels.descriptors import allow_descriptors, describable
from diffquant.kernels.gpu import device_class, device_refusal, fp8_refusal

# 128 keys a step halve the rescaling of 64, and softmax is what 8-bit attention spends most on.
TILES = {
    "prefill_int8/sm_90/64": AttentionTile(128, 128, 8, 2),
    "prefill_int8/sm_90/128": AttentionTile(128, 128, 8, 2),
    "prefill_int8/sm_80/64": AttentionTile(128, 64, 8, 2),
    "prefill_int8/sm_80/128": AttentionTile(128, 64, 8, 2),
}
PV_TYPES = ("fp16", "fp8")


def prefill_int8(call: AttentionCall, pv: str = "fp16") -> Tensor:
    """Attention of a call with Q and K in 8 bits, or all three.

    Args:
        call: one map or two of float16 or bfloat16, d 64 or 128, dv = d or 2d, logits left alone.
        pv: type of the product P·V: "fp16" multiplies P and V in V's own type, "fp8" in e4m3.

    Returns:
        [B, h, T, dv] in v's dtype, its memory [B, T, h, dv].

    Raises:
        UsageError: the kernel does not take the call, or the device cannot do what is asked.
    """
    if reason := _unsupported(call, pv):
        raise UsageError(f"prefill_int8: {reason}")
    out: Tensor = _operator(call, pv)
    return out


def prefill_int8_refusal(call: AttentionCall, pv: str = "fp16") -> str | None:
    """Reason why `prefill_int8` cannot serve a call, or None."""
    return device_refusal(call.v.device) or _unsupported(call, pv)


def _unsupported(call: AttentionCall, pv: str) -> str | None:
    if pv not in PV_TYPES:
        return f"P·V in {pv!r} is unknown; known are {', '.join(PV_TYPES)}"
    if pv == "fp8" and (reason := fp8_refusal(call.v.device)):
        return reason
    return call_refusal(call) or widths_refusal(call.q[0], call.v)


def _launch(x: Operands, pv: str) -> Tensor:
    """Output of `prefill_int8`."""
    out, q, k, v, lam = x.out, x.q, x.k, x.v, x.lam
    if x.is_blind:
        return out.zero_()
    batch, heads, length, width = q[0].shape
    kv_heads, keys, value_width = v.shape[1:]
    device_kind = device_class(v.device)
    tile = choose(TILES, f"prefill_int8/{device_kind}/{width}")
    with torch.cuda.device_of(v):
        codes = quantize_qkv(
            q, k, v, x.starts, x.ends, x.scale, tile_rows=tile.queries, block=tile.keys, values=pv == "fp8"
        )
        described = device_kind == "sm_90"
        if described and not describable(v):
            v = v.clone(memory_format=torch.contiguous_format)
        operands = _described(codes, v, tile) if described else (codes.q, codes.k, v if codes.v is None else codes.v)
        if described and codes.v is None:
            allow_descriptors()
        # No model of the family has a window or sees later keys: the kernel's branches for both are compiled away.
        attend_int8[(codes.q.shape[3] // tile.queries * batch * heads,)](
            *operands, codes.q_scale, codes.k_scale, codes.v_scale, lam, x.starts, x.ends, x.weight,
            out, out.view(torch.float16), v.stride()[:3], None if lam is None else lam.stride()[:3], out.stride()[:3],
            heads, heads // kv_heads, length, keys, codes.q.shape[3], codes.k.shape[3], None, x.eps, x.factor,
            CAUSAL=True, NORM=x.normed, MAPS=len(k), PACK=len(q) // len(k), D=width, DV=value_width, FP8=pv == "fp8",
            DESCRIBED=described, PINNED=described and not triton.knobs.runtime.interpret,
            BM=tile.queries, BN=tile.keys,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
        )  # fmt: skip
    return out


_operator = as_operator("prefill_int8", _launch, ", str pv")


def _described(codes: QuantizedKV, v: Tensor, tile: AttentionTile) -> tuple[TensorDescriptor | Tensor, ...]:
    """Descriptors of the codes, each tensor as one matrix; 16-bit V as it is."""
    width = codes.q.shape[-1]
    q = TensorDescriptor.from_tensor(codes.q.flatten(0, 3), [tile.queries, width])
    k = TensorDescriptor.from_tensor(codes.k.flatten(0, 3), [tile.keys, width])
    if codes.v is None:
        return q, k, v
    return q, k, TensorDescriptor.from_tensor(codes.v.flatten(0, 2), [min(v.shape[-1], 128), tile.keys])
