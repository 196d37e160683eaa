"""Prefill attention with warp-specialized kernels for Hopper, in half precision or in 8 bits."""

from collections.abc import Sequence
from math import e, log2

import torch
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.family.call import AttentionCall
from diffquant.kernels.arguments import Operands, call_refusal, register_operator, widths_refusal
from diffquant.kernels.attention.attend_specialized import attend_fp8_specialized, attend_specialized
from diffquant.kernels.attention.online import allow_descriptors, supports_tma
from diffquant.kernels.attention.quantize_qkv import quantize_qkv
from diffquant.kernels.configs import choose_config
from diffquant.kernels.gpu import device_class

# By the widths of keys and values: number of keys per step, and of steps that the loading warp loads ahead, as many as
# fit in shared memory. A tile has 128 rows, 64 for each of two warpgroups.
TILES = {
    # Logits of one block and weights of two are in registers at once, so with values of width 2d long steps spill.
    "prefill_specialized/sm_90/64x64": {"keys": 128, "stages": 4},
    "prefill_specialized/sm_90/64x128": {"keys": 64, "stages": 4},
    "prefill_specialized/sm_90/128x128": {"keys": 64, "stages": 4},
    "prefill_specialized/sm_90/128x256": {"keys": 64, "stages": 4},
    "prefill_fp8_specialized/sm_90/64x64": {"keys": 128, "stages": 4},
    "prefill_fp8_specialized/sm_90/64x128": {"keys": 128, "stages": 4},
    "prefill_fp8_specialized/sm_90/128x128": {"keys": 128, "stages": 4},
    # With four stages, registers spill.
    "prefill_fp8_specialized/sm_90/128x256": {"keys": 128, "stages": 3},
    # With quantized logits a row's largest code is known beforehand, so short steps cost no rescaling. Long ones spill.
    "simulated_specialized/sm_90/64x64": {"keys": 128, "stages": 4},
    "simulated_specialized/sm_90/64x128": {"keys": 64, "stages": 4},
    "simulated_specialized/sm_90/128x128": {"keys": 64, "stages": 4},
    "simulated_specialized/sm_90/128x256": {"keys": 64, "stages": 4},
}
_ROWS = 128


def prefill_specialized(call: AttentionCall, bits: int = 16) -> Tensor:
    """Compute attention of a call on Hopper, with one warp that loads and two warpgroups that compute.

    Args:
        call: call in float16 or bfloat16, d = 64 or 128, dv = d or 2d, a positive scale, no quantized logits; two maps,
            or at 8 bits one or two.
        bits: precision of the products: 16, or 8 for Q and K in int8, P and V in e4m3, as in `prefill_int8`.

    Returns:
        [B, h, T, dv] in v's dtype, in memory [B, T, h, dv].

    Raises:
        UsageError: the kernels do not support the call.
    """
    if call.scale <= 0:
        raise UsageError(f"prefill needs a positive scale, got {call.scale}")
    if reason := prefill_specialized_refusal(call, bits):
        raise UsageError(f"specialized prefill: {reason}")
    out: Tensor = _operator(call, bits)
    return out


def specialized_refusal(device: torch.device) -> str | None:
    """Return why warp-specialized kernels do not run on a device, or None if they do."""
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
) -> None:
    """Launch `attend_specialized` over all tiles.

    Args:
        q: one [B, h, T, d] per map; `supports_tma` is true for q, k and v.
        k: one [B, h_kv, S, d] per map, or one that two maps share.
        v: [B, h_kv, S, dv].
        tensors: the kernel's arguments after v, from lam to the strides.
        numbers: the kernel's arguments after the lengths, from scale to factor.
        rounded: whether logits are quantized.
        shift: whether logits are shifted before they are quantized.
        normed: whether the pair norm is applied.
    """
    batch, heads, length, width = q[0].shape
    kv_heads, keys, value_width = v.shape[1:]
    kernel = "simulated_specialized" if rounded else "prefill_specialized"
    tile = choose_config(TILES, f"{kernel}/sm_90/{width}x{value_width}")
    shared = len(q) // len(k)
    allow_descriptors()
    attend_specialized[(-(-length * shared // _ROWS) * batch * heads,)](
        q[0], q[-1], k[0], k[-1], v, *tensors, heads, heads // kv_heads, length, keys, *numbers,
        ROUNDED=rounded, SHIFT=shift, NORM=normed, MAPS=len(k), PACK=shared, D=width, DV=value_width,
        BN=tile["keys"], STAGES=tile["stages"], num_warps=4,
        # No fused multiply-add: values at the border between two codes depend on products being rounded to float32.
        enable_fp_fusion=not rounded,
    )  # fmt: skip


def prefill_specialized_refusal(call: AttentionCall, bits: int = 16) -> str | None:
    """Return why `prefill_specialized` cannot serve a call on a device that runs Triton, or None."""
    if reason := specialized_refusal(call.v.device):
        return reason
    if call.lam is None and bits == 16:
        return "the kernel supports two maps; for one use scaled_dot_product_attention"
    return call_refusal(call) or widths_refusal(call.q[0], call.v)


def _launch(x: Operands, bits: int) -> Tensor:
    """Compute the output of `prefill_specialized`."""
    out, q, k, v, lam = x.out, x.q, x.k, x.v, x.lam
    if x.is_empty:
        return out.zero_()
    batch, heads, length, width = q[0].shape
    kv_heads, keys, value_width = v.shape[1:]
    lam_strides = None if lam is None else lam.stride()[:3]
    # The noise map is stored in the output's memory.
    noise_rows = out.view(torch.float16)
    with torch.cuda.device_of(v):
        if bits == 8:
            tile = choose_config(TILES, f"prefill_fp8_specialized/sm_90/{width}x{value_width}")
            q8, q_scale, k8, k_scale, v8, v_scale = quantize_qkv(
                q, k, v, x.starts, x.ends, x.scale, tile_rows=_ROWS, block=tile["keys"], values=True
            )
            rows = q8.shape[3]
            allow_descriptors()
            attend_fp8_specialized[(rows // _ROWS * batch * heads,)](
                q8, k8, v8, q_scale, k_scale, v_scale, lam, x.starts, x.ends, x.weight,
                out, noise_rows, lam_strides, out.stride()[:3],
                heads, heads // kv_heads, length, keys, rows, k8.shape[3], x.eps, x.factor,
                NORM=x.normed, MAPS=len(k), PACK=len(q) // len(k), D=width, DV=value_width,
                BN=tile["keys"], STAGES=tile["stages"], num_warps=4, enable_fp_fusion=True,
            )  # fmt: skip
        else:
            q, k, (v,) = _describable(q), _describable(k), _describable([v])
            strides = q[0].stride()[:3], k[0].stride()[:3], v.stride()[:3], lam_strides, out.stride()[:3]
            launch_specialized(
                q, k, v, (lam, x.starts, x.ends, x.weight, None, None, None, out, noise_rows, *strides),
                (x.scale * log2(e), 0.0, 0.0, x.eps, x.factor), rounded=False, shift=False, normed=x.normed,
            )  # fmt: skip
    return out


_operator = register_operator("prefill_specialized", _launch, ", int bits")


def _describable(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors, copying those that TMA descriptors cannot read."""
    if supports_tma(*tensors):
        return tensors
    return [x.clone(memory_format=torch.contiguous_format) for x in tensors]
