"""Attention with quantized logits or softmax weights, in two kernels: extremes of each query's logits, then softmax.

In both kernels `step` is the quantization scale of a query's logits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import triton
import triton.language as tl

from diffquant.kernels.attention.online import (
    count_visible_keys,
    load_rows,
    masked_key_bounds,
    pair_norm,
    to_float16,
    valid_range,
)
from diffquant.kernels.attention.round_operands import (
    TOP_EXPONENT,
    compute_inverse_unit,
    round_in_blocks,
    round_to_float,
)

# Adding and subtracting 1.5·2^23 rounds a float32 to an integer, half to even.
_ROUND = tl.constexpr(12582912.0)


@triton.jit
def _quotient(x, step, inverse):
    """Compute x / step, correctly rounded as in IEEE division; `inverse` is the correctly rounded 1 / step."""
    guess = x * inverse
    return tl.fma(tl.fma(-guess, step, x), inverse, guess)


# Lengths change from call to call, and specializing on their divisibility by 16 would only add compilations.
@triton.jit(do_not_specialize=["T", "S"])
def compute_logit_extremes(
    q1, q2, k1, k2, q_steps, k_steps, k_maps, starts, ends, top, bottom, q_strides, k_strides,
    heads, group, T, S, scale,
    MAPS: tl.constexpr, USE_TMA: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Store the largest and smallest visible logit of each query of a tile; both are 0 for a query that sees no key.

    `scale` is positive. If `q_steps` and `k_steps` are given, queries and keys are codes with these per-token scales.
    """
    tiles = tl.cdiv(T, BM)
    tile = tiles - 1 - tl.program_id(0) % tiles
    map_of_pair = tl.program_id(0) // tiles
    pair, own = map_of_pair // MAPS, map_of_pair % MAPS
    sequence, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    start, valid = valid_range(starts, ends, sequence, S)
    query = tile * BM + tl.arange(0, BM)
    visible = count_visible_keys(query, T, S - T - start, valid)
    outer, stop = masked_key_bounds(visible, valid, BN)
    q = (q1 if own == 0 else q2) + sequence * q_strides[0] + head * q_strides[1]
    q = load_rows(q, tile * BM, 0, T, q_strides[2], BM, D, False, True)
    k = (k1 if own == 0 else k2) + sequence * k_strides[0] + head // group * k_strides[1]
    k += tl.cast(start, tl.int64) * k_strides[2]
    if USE_TMA:
        k = tl.make_tensor_descriptor(k, [valid, D], [k_strides[2], 1], [BN, D])
    row = map_of_pair.to(tl.int64) * T + query
    if k_steps is not None:
        scale *= tl.load(q_steps + row, mask=query < T, other=1.0)
        k_steps += _key_row(sequence, head // group, heads // group, own, k_maps, S) + start
    high = tl.full([BM], -float("inf"), tl.float32)
    low = tl.full([BM], float("inf"), tl.float32)
    high, low = _extremes_among(high, low, q, k, k_steps, k_strides[2], 0, outer, visible, valid, False, USE_TMA, D, BN)
    high, low = _extremes_among(
        high, low, q, k, k_steps, k_strides[2], outer, stop, visible, valid, True, USE_TMA, D, BN
    )
    # Rounding is monotonic, so the largest product is also the largest after scaling.
    tl.store(top + row, tl.where(visible > 0, high * scale, 0.0), mask=query < T)
    tl.store(bottom + row, tl.where(visible > 0, low * scale, 0.0), mask=query < T)


@triton.jit
def _key_row(sequence, head, heads, own, maps, S):
    """Return the offset of a head's key scales in [B, heads, maps, S]; maps is 1 if both maps share keys."""
    return ((sequence * heads + head) * maps + tl.minimum(own, maps - 1)) * S


@triton.jit
def _apply_steps(products, k_steps, n, BN: tl.constexpr):
    """Multiply products of codes by the keys' scales, if any. A tile may read beyond the last key's scale."""
    if k_steps is not None:
        products *= tl.load(k_steps + n + tl.arange(0, BN))[None, :]
    return products


@triton.jit
def _extremes_among(
    high, low, q, k, k_steps, k_stride, begin, stop, visible, valid,
    MASKED: tl.constexpr, USE_TMA: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    for n in tl.range(begin, stop, BN):
        rows = load_rows(k, n, 0, valid, k_stride, BN, D, USE_TMA, MASKED)
        logits = _apply_steps(tl.dot(q, rows.T), k_steps, n, BN)
        if MASKED:
            key = (n + tl.arange(0, BN))[None, :]
            seen = key < visible[:, None]
            high = tl.maximum(high, tl.max(tl.where(seen, logits, -float("inf")), 1))
            low = tl.minimum(low, tl.min(tl.where(seen, logits, float("inf")), 1))
        else:
            high = tl.maximum(high, tl.max(logits, 1))
            low = tl.minimum(low, tl.min(logits, 1))
    return high, low


@triton.jit(do_not_specialize=["T", "S"])
def attend_rounded(
    q1, q2, k1, k2, q_steps, k_steps, k_maps, v, lam, starts, ends, weight, top, steps, out, noise_rows, clipped,
    q_strides, k_strides, v_strides, lam_strides, out_strides,
    heads, group, T, S, scale, log2e, levels, weight_step, eps, factor,
    MAPS: tl.constexpr, LOGITS: tl.constexpr, SHIFT: tl.constexpr,
    WEIGHTS: tl.constexpr, BLOCKS: tl.constexpr, FULL_SUM: tl.constexpr, NORM: tl.constexpr, USE_TMA: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, HALVES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute attention of BM queries of one pair, one map after the other; q and k as in `compute_logit_extremes`.

    If LOGITS, logits are quantized. WEIGHTS is the format of the unnormalized softmax weights, which are at most 1:
    integers ("int") or e4m3 numbers ("e4m3") with scale `weight_step`, the block format BLOCKS of `BLOCK_FORMATS`
    ("blocks"), or unquantized ("none"). Rows are divided by the sum of quantized weights, or of unquantized ones if
    FULL_SUM.
    """
    DH: tl.constexpr = DV // HALVES
    tiles = tl.cdiv(T, BM)
    tile = tiles - 1 - tl.program_id(0) % tiles
    pair = tl.program_id(0) // tiles
    sequence, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    start, valid = valid_range(starts, ends, sequence, S)
    query, value = tile * BM + tl.arange(0, BM), tl.arange(0, DV)
    visible = count_visible_keys(query, T, S - T - start, valid)
    outer, stop = masked_key_bounds(visible, valid, BN)
    at = sequence * out_strides[0] + head * out_strides[1]
    at += query.to(tl.int64)[:, None] * out_strides[2] + value[None, :]
    stored = (query < T)[:, None]
    values = v + sequence * v_strides[0] + head // group * v_strides[1] + tl.cast(start, tl.int64) * v_strides[2]
    if USE_TMA:
        values = tl.make_tensor_descriptor(values, [valid, DV], [v_strides[2], 1], [BN, DH])
    for own in tl.range(0, MAPS, num_stages=1):
        q = (q1 if own == 0 else q2) + sequence * q_strides[0] + head * q_strides[1]
        q = load_rows(q, tile * BM, 0, T, q_strides[2], BM, D, False, True)
        k = (k1 if own == 0 else k2) + sequence * k_strides[0] + head // group * k_strides[1]
        k += tl.cast(start, tl.int64) * k_strides[2]
        if USE_TMA:
            k = tl.make_tensor_descriptor(k, [valid, D], [k_strides[2], 1], [BN, D])
        row = (pair * MAPS + own).to(tl.int64) * T + query
        largest = tl.load(top + row, mask=query < T, other=0.0)
        step = tl.load(steps + row, mask=query < T, other=1.0)
        factor_of = scale
        of_keys = k_steps
        if k_steps is not None:
            factor_of = (scale * tl.load(q_steps + row, mask=query < T, other=1.0))[:, None]
            of_keys += _key_row(sequence, head // group, heads // group, own, k_maps, S) + start
        inverse = tl.div_rn(1.0, step)
        # The largest code: 0 with shifted logits, else the code of the row's largest logit.
        code = tl.zeros([BM], tl.float32)
        if LOGITS and not SHIFT:
            code = (_quotient(largest, step, inverse) + _ROUND) - _ROUND
        left = tl.zeros([BM, DH], tl.float32)
        right = tl.zeros([BM, DH], tl.float32)
        total = tl.zeros([BM], tl.float32)
        below = tl.zeros([BM], tl.int32)
        left, right, total, below = _attend_among(
            left, right, total, below, q, k, of_keys, values, k_strides[2], v_strides[2], 0, outer,
            visible, valid, factor_of, largest, step, inverse, code, log2e, levels, weight_step,
            False, LOGITS, SHIFT, WEIGHTS, BLOCKS, FULL_SUM, USE_TMA, D, DH, HALVES, BN,
        )  # fmt: skip
        left, right, total, below = _attend_among(
            left, right, total, below, q, k, of_keys, values, k_strides[2], v_strides[2], outer, stop,
            visible, valid, factor_of, largest, step, inverse, code, log2e, levels, weight_step,
            True, LOGITS, SHIFT, WEIGHTS, BLOCKS, FULL_SUM, USE_TMA, D, DH, HALVES, BN,
        )  # fmt: skip
        if SHIFT:
            tl.store(clipped + row, below, mask=query < T)
        y = tl.join(left, right).permute(0, 2, 1).reshape([BM, DV]) if HALVES == 2 else left
        # Selected instead of multiplied by 0: weights of a row without visible keys may be infinite.
        y = tl.where((visible > 0)[:, None], y * (1 / tl.where(total == 0, 1.0, total))[:, None], 0.0)
        if own + 1 < MAPS:
            # In fp16 whatever the output's dtype, since bfloat16 would lose precision of the difference.
            tl.store(noise_rows + at, to_float16(y), mask=stored)
            # A thread may read what another one stored.
            tl.debug_barrier()
        else:
            if MAPS == 2:
                second = sequence * lam_strides[0] + head * lam_strides[1] + query.to(tl.int64) * lam_strides[2]
                second = tl.load(lam + second, mask=query < T, other=0.0)
                y = tl.load(noise_rows + at, mask=stored, other=0.0).to(tl.float32) - second[:, None] * y
            if NORM:
                y = pair_norm(y, weight, eps, factor, DV)
            tl.store(out + at, y.to(out.dtype.element_ty), mask=stored)


@triton.jit
def _attend_among(
    left, right, total, below, q, k, k_steps, values, k_stride, v_stride, begin, stop, visible, valid, scale,
    largest, step, inverse, code, log2e, levels, weight_step,
    MASKED: tl.constexpr, LOGITS: tl.constexpr, SHIFT: tl.constexpr, WEIGHTS: tl.constexpr, BLOCKS: tl.constexpr,
    FULL_SUM: tl.constexpr,
    USE_TMA: tl.constexpr,
    D: tl.constexpr, DH: tl.constexpr, HALVES: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    unit = (step * log2e)[:, None]
    floor = (-(levels + 0.5) * step)[:, None]
    for n in tl.range(begin, stop, BN):
        rows = load_rows(k, n, 0, valid, k_stride, BN, D, USE_TMA, MASKED)
        logits = _apply_steps(tl.dot(q, rows.T), k_steps, n, BN) * scale
        if SHIFT or not LOGITS:
            logits -= largest[:, None]
        if LOGITS:
            codes = _quotient(logits, step[:, None], inverse[:, None]) + _ROUND
            if SHIFT:
                codes = tl.maximum(codes - _ROUND, -1.0 * levels)
            else:
                codes -= (code + _ROUND)[:, None]
            p = tl.exp2(codes * unit)
        else:
            p = tl.exp2(logits * log2e)
        under = logits < floor
        if MASKED:
            key = (n + tl.arange(0, BN))[None, :]
            seen = key < visible[:, None]
            p = tl.where(seen, p, 0.0)
            under = under & seen
        if SHIFT:
            below += tl.sum(under.to(tl.int32), 1)
        if WEIGHTS == "int" or WEIGHTS == "e4m3":
            # Codes are exact in float16 and bfloat16, so they are multiplied; their scale cancels with the sum's.
            p = _quotient(p, weight_step, tl.div_rn(1.0, weight_step))
        if FULL_SUM:
            total += tl.sum(p, 1) * compute_inverse_unit(BLOCKS) if WEIGHTS == "blocks" else tl.sum(p, 1)
        if WEIGHTS == "int":
            p = (p + _ROUND) - _ROUND
        elif WEIGHTS == "e4m3":
            p = round_to_float(p, 3, -6)
        elif WEIGHTS == "blocks":
            p = round_in_blocks(p, BLOCKS, TOP_EXPONENT)
        if not FULL_SUM:
            total += tl.sum(p, 1)
        p = p.to(q.dtype)
        left = tl.dot(p, load_rows(values, n, 0, valid, v_stride, BN, DH, USE_TMA, MASKED), left)
        if HALVES == 2:
            right = tl.dot(p, load_rows(values, n, DH, valid, v_stride, BN, DH, USE_TMA, MASKED), right)
    return left, right, total, below
