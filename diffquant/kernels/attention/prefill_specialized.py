"""Differential attention of many queries by warp-specialized kernels for Hopper: in half precision, or in 8 bits."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import e, log2

import torch
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.family.call import AttentionCall
from diffquant.kernels.arguments import call_refusal, widths_refusal
from diffquant.kernels.attention.attend_fp8_specialized import attend_fp8_specialized
from diffquant.kernels.attention.attend_specialized import attend_specialized
from diffquant.kernels.attention.operator import Operands, as_operator
from diffquant.kernels.attention.quantize_qkv import quantize_qkv
from diffquant.kernels.configs import choose
from diffquant.kernels.descriptors import allow_descriptors, describable
from diffquant.kernels.gpu import device_class, device_refusal


@dataclass(frozen=True)
class SpecializedTile:
    """A tile of 128 rows, 64 for each of two warpgroups.

    Attributes:
        keys: number of keys a step.
        stages: number of steps that a warp of its own loads ahead.
    """

    keys: int
    stages: int


# As many stages as shared memory holds, by the widths of keys and values.
TILES = {
    "prefill_specialized/sm_90/64x64": SpecializedTile(128, 4),
    "prefill_specialized/sm_90/64x128": SpecializedTile(128, 4),
    "prefill_specialized/sm_90/128x128": SpecializedTile(128, 3),
    "prefill_specialized/sm_90/128x256": SpecializedTile(128, 2),
    "prefill_fp8_specialized/sm_90/64x64": SpecializedTile(128, 4),
    "prefill_fp8_specialized/sm_90/64x128": SpecializedTile(128, 4),
    "prefill_fp8_specialized/sm_90/128x128": SpecializedTile(128, 4),
    # With four, registers spill.
    "prefill_fp8_specialized/sm_90/128x256": SpecializedTile(128, 3),
    # A block's logits and two blocks' weights are in registers at once: with values of 2d, long steps spill.
    "prefill_pipelined/sm_90/64x64": SpecializedTile(128, 4),
    "prefill_pipelined/sm_90/64x128": SpecializedTile(64, 4),
    "prefill_pipelined/sm_90/128x128": SpecializedTile(128, 3),
    "prefill_pipelined/sm_90/128x256": SpecializedTile(64, 4),
    # Rounding knows a row's largest code beforehand, so that short steps cost no rescaling; long ones spill.
    "simulated_specialized/sm_90/64x64": SpecializedTile(128, 4),
    "simulated_specialized/sm_90/64x128": SpecializedTile(128, 4),
    "simulated_specialized/sm_90/128x128": SpecializedTile(64, 4),
    "simulated_specialized/sm_90/128x256": SpecializedTile(64, 4),
}
_ROWS = 128


def prefill_specialized(call: AttentionCall, bits: int = 16, pipelined: bool = False) -> Tensor:
    """Attention of a call on Hopper, one warp loading while two warpgroups compute.

    Args:
        call: maps of float16 or bfloat16, d 64 or 128, dv = d or 2d, a positive scale, logits left alone; two maps, or
            at 8 bits one or two.
        bits: width of what is multiplied: 16, or 8 for Q and K in int8, P and V in e4m3, as `prefill_int8` does.
        pipelined: whether products run while softmax is computed, and warpgroups take turns; at 16 bits.

    Returns:
        [B, h, T, dv] in v's dtype, its memory [B, T, h, dv].

    Raises:
        UsageError: the kernels do not take the call.
    """
    if call.scale <= 0:
        raise UsageError(f"prefill takes a positive scale, got {call.scale}")
    if reason := _unsupported(call, bits, pipelined):
        raise UsageError(f"specialized prefill: {reason}")
    out: Tensor = _operator(call, bits, pipelined)
    return out


def prefill_specialized_refusal(call: AttentionCall, bits: int = 16, pipelined: bool = False) -> str | None:
    """Reason why `prefill_specialized` cannot serve a call, or None."""
    return device_refusal(call.v.device) or _unsupported(call, bits, pipelined)


def specialized_refusal(device: torch.device) -> str | None:
    """Reason why no warp-specialized kernel runs on a device, or None."""
    if device_class(device) != "sm_90":
        return "warp-specialized kernels run only on Hopper (compute capability 9.0)"
    return None


def launch_specialized(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Tensor,
    tensors: tuple[object, ...],
    numbers: tuple[float, ...],
    *,
    rounded: bool,
    shift: bool,
    normed: bool,
    pipelined: bool = False,
) -> None:
    """Launch `attend_specialized` over all tiles.

    Args:
        q: one [B, h, T, d] a map.
        k: one [B, h_kv, S, d] a map, or one that two maps share.
        v: [B, h_kv, S, dv]; descriptors can read it and the others.
        tensors: arguments of the kernel behind v, strides included.
        numbers: those behind the lengths.
        rounded: whether logits are rounded to codes, of shifted logits if `shift`.
        normed: whether rows are normed.
        pipelined: as in `prefill_specialized`; logits that are not rounded alone.
    """
    batch, heads, length, width = q[0].shape
    kv_heads, keys, value_width = v.shape[1:]
    kernel = "simulated_specialized" if rounded else "prefill_pipelined" if pipelined else "prefill_specialized"
    tile = choose(TILES, f"{kernel}/sm_90/{width}x{value_width}")
    shared = len(q) // len(k)
    allow_descriptors()
    attend_specialized[(-(-length * shared // _ROWS) * batch * heads,)](
        q[0], q[-1], k[0], k[-1], v, *tensors, heads, heads // kv_heads, length, keys, *numbers,
        ROUNDED=rounded, SHIFT=shift, NORM=normed, MAPS=len(k), PACK=shared, D=width, DV=value_width,
        BN=tile.keys, STAGES=tile.stages, PIPELINED=pipelined, num_warps=4,
        # A product rounded to float32 decides codes at their borders: nothing is contracted behind the formula's back.
        enable_fp_fusion=not rounded,
    )  # fmt: skip


def _unsupported(call: AttentionCall, bits: int, pipelined: bool) -> str | None:
    if pipelined and bits == 8:
        return "8-bit attention has no pipelined form: registers do not hold what it would have under way"
    if reason := specialized_refusal(call.v.device):
        return reason
    if call.lam is None and bits == 16:
        return "the kernel takes two maps; one is scaled_dot_product_attention"
    return call_refusal(call) or widths_refusal(call.q[0], call.v)


def _launch(x: Operands, bits: int, pipelined: bool) -> Tensor:
    """Output of `prefill_specialized`."""
    out, q, k, v, lam = x.out, x.q, x.k, x.v, x.lam
    if x.is_blind:
        return out.zero_()
    batch, heads, length, width = q[0].shape
    kv_heads, keys, value_width = v.shape[1:]
    lam_strides = None if lam is None else lam.stride()[:3]
    # The noise map waits in the output's own memory.
    parked = out.view(torch.float16)
    with torch.cuda.device_of(v):
        if bits == 8:
            tile = choose(TILES, f"prefill_fp8_specialized/sm_90/{width}x{value_width}")
            codes = quantize_qkv(q, k, v, x.starts, x.ends, x.scale, tile_rows=_ROWS, block=tile.keys, values=True)
            rows = codes.q.shape[3]
            allow_descriptors()
            attend_fp8_specialized[(rows // _ROWS * batch * heads,)](
                codes.q, codes.k, codes.v, codes.q_scale, codes.k_scale, codes.v_scale, lam, x.starts, x.ends, x.weight,
                out, parked, lam_strides, out.stride()[:3],
                heads, heads // kv_heads, length, keys, rows, codes.k.shape[3], x.eps, x.factor,
                NORM=x.normed, MAPS=len(k), PACK=len(q) // len(k), D=width, DV=value_width,
                BN=tile.keys, STAGES=tile.stages, num_warps=4, enable_fp_fusion=True,
            )  # fmt: skip
        else:
            q, k, (v,) = _describable(q), _describable(k), _describable([v])
            strides = q[0].stride()[:3], k[0].stride()[:3], v.stride()[:3], lam_strides, out.stride()[:3]
            launch_specialized(
                q, k, v, (lam, x.starts, x.ends, x.weight, None, None, None, out, parked, *strides),
                (x.scale * log2(e), 0.0, 0.0, x.eps, x.factor), rounded=False, shift=False, normed=x.normed,
                pipelined=pipelined,
            )  # fmt: skip
    return out


_operator = as_operator("prefill_specialized", _launch, ", int bits, bool pipelined")


def _describable(tensors: list[Tensor]) -> list[Tensor]:
    """Tensors as descriptors can read them, copied only where they cannot."""
    if describable(*tensors):
        return tensors
    return [x.clone(memory_format=torch.contiguous_format) for x in tensors]
