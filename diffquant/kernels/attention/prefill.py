"""Differential attention of many queries in one kernel launch: both maps, λ and the pair norm.

For inference: it has no backward pass. The reference is `diffquant.attention.naive`.

If each map has its own keys (V1), the noise map is computed first and stored in the output's memory; then the signal
map is computed and the two are combined. Accumulators of both maps would not fit in registers at d = 128, where V has
256 channels. If the maps share keys (V2), a pair's two queries are two rows of one tile, so K and V are read once for
both maps, as in a plain Transformer with twice the queries. The rows are subtracted at the end.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from math import e, log2
from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.family.call import AttentionCall
from diffquant.kernels.arguments import Operands, call_refusal, register_operator, widths_refusal
from diffquant.kernels.attention.online import (
    allow_descriptors,
    attend_tile,
    load_rows,
    pair_norm,
    supports_tma,
    tensor_offset,
    to_float16,
    valid_range,
)
from diffquant.kernels.configs import PREFILL, choose_config
from diffquant.kernels.gpu import device_class


# Lengths change from call to call, and specializing on their divisibility by 16 would only add compilations.
@triton.jit(do_not_specialize=["queries", "keys", "lam_strides"])
def prefill_v1(
    Q1, Q2, K1, K2, V, Lam, Out, Parked, Starts, Ends, Weight,
    q_strides, k_strides, v_strides, lam_strides, out_strides,
    pairs, group, queries, keys, scale, eps, factor,
    NORM: tl.constexpr, USE_TMA: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Compute the output [B, h, T, dv] of q [B, h, T, d], k [B, h_kv, S, d], v [B, h_kv, S, dv] and λ [B, h, T].

    Each program computes one tile: ROWS queries of one pair. Parked is Out's memory as float16, in which the noise map
    is stored. Strides are in elements, of batch, head and position; `scale` includes log2(e).
    """
    VALUE_WIDTH: tl.constexpr = PART * PARTS
    tiles = tl.cdiv(queries, ROWS)
    # Tiles at the end see the most keys, so they start first.
    top = (tiles - 1 - tl.program_id(0) % tiles) * ROWS
    pair = tl.program_id(0) // tiles % pairs
    sequence = tl.program_id(0) // tiles // pairs
    start, valid = valid_range(Starts, Ends, sequence, keys)
    offset = keys - queries - start
    row = top + tl.arange(0, ROWS)
    position = row + offset
    last = tl.minimum(top + ROWS, queries) - 1 + offset

    kv_pair = pair // group
    lam = tl.load(Lam + tensor_offset(lam_strides, sequence, pair, row), mask=row < queries, other=0.0)
    places = tensor_offset(out_strides, sequence, pair, top)
    places += tl.arange(0, ROWS)[:, None] * out_strides[2] + tl.arange(0, VALUE_WIDTH)[None, :]
    inside = (row < queries)[:, None]

    values = V + tensor_offset(v_strides, sequence, kv_pair, start)
    if USE_TMA:
        values = tl.make_tensor_descriptor(values, [valid, VALUE_WIDTH], [v_strides[2], 1], [STEP, PART])
    for is_signal in tl.range(0, 2, num_stages=1):
        k = (K1 if is_signal else K2) + tensor_offset(k_strides, sequence, kv_pair, start)
        if USE_TMA:
            k = tl.make_tensor_descriptor(k, [valid, WIDTH], [k_strides[2], 1], [STEP, WIDTH])
        q = (Q1 if is_signal else Q2) + tensor_offset(q_strides, sequence, pair, top)
        q = load_rows(q, 0, 0, queries - top, q_strides[2], ROWS, WIDTH, False, True)
        out = attend_tile(
            q, k, values, k_strides[2], v_strides[2], top + offset, last, position, valid, scale,
            USE_TMA, STEP, WIDTH, PART, PARTS,
        )  # fmt: skip
        if is_signal:
            # A thread may read what another one stored.
            tl.debug_barrier()
            out -= tl.load(Parked + places, mask=inside, other=0.0).to(tl.float32)
            if NORM:
                out = pair_norm(out, Weight, eps, factor, VALUE_WIDTH)
            tl.store(Out + places, out.to(Out.dtype.element_ty), mask=inside)
        else:
            # In fp16 whatever the output's dtype, since bfloat16 would lose precision of the difference.
            tl.store(Parked + places, to_float16(out * lam[:, None]), mask=inside)


# Lengths change from call to call, and specializing on their divisibility by 16 would only add compilations.
@triton.jit(do_not_specialize=["queries", "keys", "lam_strides"])
def prefill_v2(
    Q1, Q2, K, V, Lam, Out, Starts, Ends, Weight,
    q_strides, k_strides, v_strides, lam_strides, out_strides,
    pairs, group, queries, keys, scale, eps, factor,
    NORM: tl.constexpr, USE_TMA: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Compute what `prefill_v1` computes for maps that share K [B, h_kv, S, d]; a tile has ROWS / 2 queries."""
    held: tl.constexpr = ROWS // 2
    VALUE_WIDTH: tl.constexpr = PART * PARTS
    tiles = tl.cdiv(queries, held)
    # Tiles at the end see the most keys, so they start first.
    top = (tiles - 1 - tl.program_id(0) % tiles) * held
    pair = tl.program_id(0) // tiles % pairs
    sequence = tl.program_id(0) // tiles // pairs
    start, valid = valid_range(Starts, Ends, sequence, keys)
    offset = keys - queries - start
    last = tl.minimum(top + held, queries) - 1 + offset

    # Rows alternate between eight signal queries and their eight noise queries. Tensor cores leave rows r and r + 8 of
    # sixteen in one thread, which can subtract them without communication.
    slot = tl.arange(0, ROWS)
    query = slot // 16 * 8 + slot % 8
    is_noise = slot // 8 % 2 == 1
    row = top + query

    kv_pair = pair // group
    spot = tensor_offset(q_strides, sequence, pair, row)[:, None] + tl.arange(0, WIDTH)[None, :]
    noise = tl.load(Q2 + spot, mask=((row < queries) & is_noise)[:, None], other=0.0)
    # No arithmetic between load and product: it would keep q in registers that the accumulator needs.
    q = tl.load(Q1 + spot, mask=((row < queries) & ~is_noise)[:, None], other=noise)

    k = K + tensor_offset(k_strides, sequence, kv_pair, start)
    values = V + tensor_offset(v_strides, sequence, kv_pair, start)
    if USE_TMA:
        k = tl.make_tensor_descriptor(k, [valid, WIDTH], [k_strides[2], 1], [STEP, WIDTH])
        values = tl.make_tensor_descriptor(values, [valid, VALUE_WIDTH], [v_strides[2], 1], [STEP, PART])
    both = attend_tile(
        q, k, values, k_strides[2], v_strides[2], top + offset, last, row + offset, valid, scale,
        USE_TMA, STEP, WIDTH, PART, PARTS,
    )  # fmt: skip

    both = both.reshape(ROWS // 16, 2, 8, VALUE_WIDTH).permute(0, 2, 3, 1)
    signal, noise = tl.split(both)
    signal = signal.reshape(held, VALUE_WIDTH)
    noise = noise.reshape(held, VALUE_WIDTH)
    row = top + tl.arange(0, held)
    lam = tl.load(Lam + tensor_offset(lam_strides, sequence, pair, row), mask=row < queries, other=0.0)
    out = signal - lam[:, None] * noise
    if NORM:
        out = pair_norm(out, Weight, eps, factor, VALUE_WIDTH)
    places = Out + tensor_offset(out_strides, sequence, pair, top)
    places += tl.arange(0, held)[:, None] * out_strides[2] + tl.arange(0, VALUE_WIDTH)[None, :]
    tl.store(places, out.to(Out.dtype.element_ty), mask=(row < queries)[:, None])


# Widest part of V in one product on Ampere, where wider ones would distribute warps over columns: see `attend_tile`.
_AMPERE_COLUMNS = 128


def prefill(call: AttentionCall) -> Tensor:
    """Compute attention of a call in one launch: both maps, λ and the pair norm.

    Args:
        call: call with two maps, float16 or bfloat16, d = 64 or 128, dv = d or 2d, a positive scale, no quantization.

    Returns:
        [B, h, T, dv], in memory [B, T, h, dv].

    Raises:
        UsageError: the kernels do not support the call.
    """
    if call.scale <= 0:
        raise UsageError(f"prefill needs a positive scale, got {call.scale}")
    reason = prefill_refusal(call)
    if reason or call.lam is None:
        raise UsageError(f"prefill: {reason}")
    out: Tensor = _operator(call)
    return out


def prefill_refusal(call: AttentionCall) -> str | None:
    """Return why `prefill` cannot serve a call on a device that runs Triton, or None."""
    if call.lam is None:
        return "the kernel supports two maps; for one use scaled_dot_product_attention"
    return call_refusal(call) or widths_refusal(call.q[0], call.v)


def _launch(x: Operands) -> Tensor:
    """Compute the output of `prefill`."""
    out, v, lam = x.out, x.v, cast(Tensor, x.lam)
    if x.is_empty:
        return out.zero_()
    batch, pairs, queries, width = x.q[0].shape
    kv_pairs, keys, value_width = v.shape[1:]
    has_own_keys = len(x.k) == 2
    kernel, name = (prefill_v1, "prefill_v1") if has_own_keys else (prefill_v2, "prefill_v2")
    device_kind = device_class(v.device)
    described = device_kind == "sm_90" and supports_tma(*x.k, v)
    tile = choose_config(PREFILL, f"{name}/{device_kind if described else 'sm_80'}/{width}")
    if described:
        allow_descriptors()
    part = value_width if described else min(value_width, _AMPERE_COLUMNS)
    # V1's noise map is stored in the output's memory.
    noise_rows = (out.view(torch.float16),) if has_own_keys else ()
    per_tile = tile["queries"] if has_own_keys else tile["queries"] // 2
    with torch.cuda.device_of(v):
        kernel[(-(-queries // per_tile) * pairs * batch,)](
            *x.q, *x.k, v, lam, out, *noise_rows, x.starts, x.ends, x.weight,
            x.q[0].stride()[:3], x.k[0].stride()[:3], v.stride()[:3], lam.stride()[:3], out.stride()[:3],
            pairs, pairs // kv_pairs, queries, keys, x.scale * log2(e), x.eps, x.factor,
            NORM=x.normed, USE_TMA=described,
            ROWS=tile["queries"], STEP=tile["keys"], WIDTH=width, PART=part, PARTS=value_width // part,
            num_warps=tile["warps"], num_stages=tile["stages"], enable_fp_fusion=True,
        )  # fmt: skip
    return out


_operator = register_operator("prefill", _launch)
