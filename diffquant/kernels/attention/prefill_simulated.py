"""Prefill attention with simulated low-bit logits or softmax weights, quantized inside the kernel as in `naive`.

The maps are never stored. The first launch finds each query's largest and smallest logit, from which torch computes
the scales. The second launch computes the logits again, quantizes them and computes attention. Rounding is monotonic,
so a query's largest code is known beforehand and softmax needs no running maximum.
"""

from math import e, log2

import torch
import triton
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.family.call import AttentionCall
from diffquant.kernels.arguments import Operands, call_refusal, register_operator, widths_refusal
from diffquant.kernels.attention.attend_rounded import attend_rounded, compute_logit_extremes
from diffquant.kernels.attention.online import allow_descriptors, supports_tma
from diffquant.kernels.attention.prefill_specialized import launch_specialized, specialized_refusal
from diffquant.kernels.attention.round_operands import BLOCK_FORMATS, operands_refusal, quantize_per_token
from diffquant.kernels.configs import choose_config, make_attention_config
from diffquant.kernels.gpu import device_class
from diffquant.recipe.numbers.formats import format_named
from diffquant.recipe.numbers.simulation import logit_format, softmax_weight_scale
from diffquant.recipe.scheme import FULL, Scheme

TILES = {
    "simulated/sm_90/64": make_attention_config(128, 64, 8, 2),
    "simulated/sm_90/128": make_attention_config(128, 64, 8, 2),
    "simulated/sm_80/64": make_attention_config(128, 64, 8, 2),
    "simulated/sm_80/128": make_attention_config(128, 32, 8, 2),
}
GRANULARITIES = ("tensor", "head", "pair", "row")


def prefill_simulated(call: AttentionCall, specialized: bool = False) -> Tensor:
    """Compute attention with logits, softmax weights, queries and keys quantized to a call's schemes.

    Args:
        call: call with one or two maps, float16 or bfloat16, d = 64 or 128, dv = d or 2d, a scale of at least 0.
            Logits may be at 2 to 8 bits per tensor, head, pair or row. Softmax weights may be at 2 to 8 bits or e4m3
            per row, or, without left padding, in a format of `BLOCK_FORMATS`. For `qk` see `operands_refusal`.
        specialized: whether the second launch uses the warp-specialized kernel for Hopper.

    Returns:
        [B, h, T, dv] in v's dtype, in memory [B, T, h, dv].

    Raises:
        UsageError: the kernel does not support the call.
    """
    if call.scale < 0:
        raise UsageError(f"simulated logits need a scale of 0 or more, got {call.scale}")
    if reason := prefill_simulated_refusal(call, specialized):
        raise UsageError(f"simulated logits: {reason}")
    scheme, weights, qk = call.logits, *(str(x) if x.quantizes else "" for x in (call.p, call.qk))
    shift = scheme.has_transform("shift")
    out: Tensor
    out, largest, clipped = _operator(call, scheme.bits, scheme.granularity, shift, weights, qk, specialized)
    call.record_in_meter()
    if call.meter is not None and scheme.quantizes:
        call.meter.add_counts(_visible_entries(call) * call.pairs * call.maps, clipped.sum())
        for magnitudes in largest.expand(-1, -1, call.maps, -1).unbind(2):
            scales = logit_format(scheme.format, shift).scale_for_largest(magnitudes)
            call.meter.record_scales(scales, magnitudes)
    return out


def prefill_simulated_refusal(call: AttentionCall, specialized: bool = False) -> str | None:
    """Return why `prefill_simulated` does not support a call on a device that runs Triton, or None."""
    scheme = call.logits
    if specialized and (reason := specialized_refusal(call.v.device)):
        return reason
    if not call.has_quantized_maps:
        return "the call quantizes nothing; use a kernel without simulation"
    if call.p.quantizes and (reason := _weights_refusal(call, specialized)):
        return f"softmax weights at {call.p}: {reason}"
    if call.qk.quantizes:
        reason = "the warp-specialized kernel quantizes only logits" if specialized else operands_refusal(call.qk)
        if reason is not None:
            return f"queries and keys at {call.qk}: {reason}"
    if not scheme.quantizes:
        return call_refusal(call) or widths_refusal(call.q[0], call.v)
    if scheme.format.integer_refusal:
        return f"logits at {scheme}: {scheme.format.integer_refusal}"
    if scheme.granularity not in GRANULARITIES:
        return f"one scale per {scheme.granularity} is not supported; the kernel supports {', '.join(GRANULARITIES)}"
    served = ("shift",) if call.maps == 2 else ("shift", "alike")
    if others := [each.name for each in scheme.transforms if each.name not in served]:
        return f"logits with {others[0]} are not supported; the kernel rounds each map separately"
    return call_refusal(call) or widths_refusal(call.q[0], call.v)


def _weights_refusal(call: AttentionCall, specialized: bool) -> str | None:
    scheme = call.p
    if specialized:
        return "the warp-specialized kernel quantizes only logits"
    if others := [each.name for each in scheme.transforms if each.name not in ("pow2", "fullsum")]:
        return f"{others[0]} is not supported; the kernel supports pow2 and fullsum"
    if (known := BLOCK_FORMATS.get(scheme.format.name)) is not None:
        if scheme.granularity_size != known[0]:
            return f"blocks of {scheme.granularity_size} keys are not supported; the kernel supports {known[0]}"
        # The scheme counts blocks of keys from position 0, the kernel from a sequence's first valid key.
        return None if (call.mask.valid_ranges or (None,))[0] is None else "the kernel does not support padding"
    if scheme.granularity != "row":
        return f"one scale per {scheme.granularity} is not supported; the kernel supports row"
    return None if scheme.format.name == "e4m3" else scheme.format.integer_refusal


def _kind_of(weights: Scheme) -> str:
    """Return the kernel's WEIGHTS argument for a scheme of softmax weights."""
    if not weights.quantizes:
        return "none"
    if weights.format.name in BLOCK_FORMATS:
        return "blocks"
    return "e4m3" if weights.format.name == "e4m3" else "int"


def _launch(
    x: Operands, bits: int, granularity: str, shift: bool, weights: str, qk: str, specialized: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the output of `prefill_simulated`, and statistics for the meter.

    Args:
        x: tensors of the call.
        bits, granularity, shift: the logits' scheme; 16 bits for unquantized logits.
        weights, qk: schemes of the softmax weights, and of queries and keys; "" if they are not quantized.
        specialized: as in `prefill_simulated`.

    Returns:
        The output; the largest |logit| per scale, [B, h, maps, T] with size 1 for axes that share a scale; and the
        number of clipped logits of each query, int32 [B, h, maps, T].
    """
    out, q, v, lam = x.out, x.q, x.v, x.lam
    batch, heads, length, width = q[0].shape
    kv_heads, keys, value_width = v.shape[1:]
    maps = len(q)
    clipped = torch.zeros(batch, heads, maps, length, dtype=torch.int32, device=v.device)
    top, bottom = torch.zeros(2, batch, heads, maps, length, device=v.device)
    if x.is_empty:
        return out.zero_(), _largest_of_shared(top, granularity), clipped
    scheme = Scheme.parse(weights) if weights else FULL
    of_weights = {
        "LOGITS": bits < 16,
        "WEIGHTS": _kind_of(scheme),
        "BLOCKS": BLOCK_FORMATS.get(scheme.format.name),
        "FULL_SUM": scheme.has_transform("fullsum"),
    }
    weight_step = (
        float(softmax_weight_scale(scheme.format, scheme.has_transform("pow2"))) if scheme.granularity == "row" else 1.0
    )
    k, k_maps = x.k, len(x.k)
    q_steps = k_steps = None
    if qk:
        with torch.cuda.device_of(v):
            (q, q_steps), (k, k_steps) = (quantize_per_token(rows, Scheme.parse(qk)) for rows in (q, k))
    k = k * (maps // k_maps)
    device_kind = device_class(v.device)
    described = device_kind == "sm_90"
    if described:
        k = k if supports_tma(*k) else [x.clone(memory_format=torch.contiguous_format) for x in k]
        v = v if supports_tma(v) else v.clone(memory_format=torch.contiguous_format)
    tile = choose_config(TILES, f"simulated/{device_kind}/{width}")
    lengths = (heads, heads // kv_heads, length, keys)
    with torch.cuda.device_of(v):
        if described:
            allow_descriptors()
        compute_logit_extremes[(triton.cdiv(length, tile["queries"]) * batch * heads * maps,)](
            q[0], q[-1], k[0], k[-1], q_steps, k_steps, k_maps, x.starts, x.ends, top, bottom,
            q[0].stride()[:3], k[0].stride()[:3], *lengths, x.scale,
            MAPS=maps, USE_TMA=described, D=width, BM=tile["queries"], BN=tile["keys"],
            num_warps=tile["warps"], num_stages=tile["stages"], enable_fp_fusion=False,
        )  # fmt: skip
        largest = _largest_of_shared(top - bottom if shift else torch.maximum(top.abs(), bottom.abs()), granularity)
        rounding = logit_format(format_named(str(bits)), shift)
        scales = rounding.scale_for_largest(largest) if rounding.quantizes else torch.ones_like(largest)
        scales = scales.expand(batch, heads, maps, length).contiguous()
        if described:
            allow_descriptors()
        strides = (
            q[0].stride()[:3], k[0].stride()[:3], v.stride()[:3],
            None if lam is None else lam.stride()[:3], out.stride()[:3],
        )  # fmt: skip
        noise_rows = out.view(torch.float16)
        # No fused multiply-add: values at the border between two codes depend on products being rounded to float32.
        if specialized:
            launch_specialized(
                q, k, v, (lam, x.starts, x.ends, x.weight, top, scales, clipped, out, noise_rows, *strides),
                (x.scale, log2(e), 2.0**bits - 1, x.eps, x.factor), rounded=True, shift=shift, normed=x.normed,
            )  # fmt: skip
        else:
            attend_rounded[(triton.cdiv(length, tile["queries"]) * batch * heads,)](
                q[0], q[-1], k[0], k[-1], q_steps, k_steps, k_maps, v, lam, x.starts, x.ends, x.weight, top, scales,
                out, noise_rows, clipped, *strides, *lengths,
                x.scale, log2(e), 2**bits - 1, weight_step, x.eps, x.factor,
                MAPS=maps, **of_weights, SHIFT=shift, NORM=x.normed, USE_TMA=described,
                D=width, DV=value_width,
                HALVES=2 if value_width > tile["queries"] and not described else 1, BM=tile["queries"], BN=tile["keys"],
                num_warps=tile["warps"], num_stages=tile["stages"], enable_fp_fusion=False,
            )  # fmt: skip
    return out, largest, clipped


def _empty(out: Tensor, q: list[Tensor], _bits: int, granularity: str, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialized results with the shapes and dtypes of `_launch`'s, for torch.compile."""
    rows = out.new_empty(*out.shape[:2], len(q), out.shape[2], dtype=torch.float32)
    return out, _largest_of_shared(rows, granularity), rows.to(torch.int32)


_operator = register_operator(
    "simulated_logits",
    _launch,
    ", int bits, str granularity, bool shift, str weights, str qk, bool specialized",
    "(Tensor, Tensor, Tensor)",
    _empty,
)


def _largest_of_shared(rows: Tensor, granularity: str) -> Tensor:
    """Compute the maximum of values [B, h, maps, T] over the axes that share a scale."""
    axes = {"row": (), "head": (3,), "pair": (2, 3), "tensor": (1, 2, 3), "": ()}[granularity]
    return rows.amax(axes, keepdim=True) if axes else rows.clone()


def _visible_entries(call: AttentionCall) -> Tensor:
    """Count the visible logits of one head and map, summed over the batch, on the call's device."""
    starts, ends = call.mask.valid_ranges or (None, None)
    batch, device = call.v.shape[0], call.v.device
    position = torch.arange(call.key_count - call.query_count, call.key_count, device=device)
    start = torch.zeros(batch, 1, dtype=torch.long, device=device) if starts is None else starts[:, None]
    end = torch.full_like(start, call.key_count) if ends is None else ends[:, None]
    inside = (position >= start) & (position < end)
    return torch.where(inside, position + 1 - start, 0).sum()
