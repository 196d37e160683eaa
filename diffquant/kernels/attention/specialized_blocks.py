"""Attention of a warpgroup over blocks of keys, for all warp-specialized kernels (Gluon).

In half precision a step starts QK of its block and PV of the block before, and computes its block's weights while PV
runs. The two warpgroups take turns at starting products, so that one computes weights while the other's products run.
FlashAttention-3 overlaps in the same way (arXiv 2407.08608, sections 3.1 and 3.2); here mbarriers pass the turns. With
8-bit codes nothing runs behind a warpgroup's own weights: a turn is PV of a block and the start of QK of the next.

Weights are those of an online softmax. Logits are in half precision, from 8-bit codes as in `attend_int8`, or quantized
by the same sequence of operations as in `attend_rounded`, so that each logit gets the same code.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="attr-defined,assignment"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

# Adding and subtracting 1.5·2^23 rounds a float32 to an integer, half to even.
_ROUND = gl.constexpr(12582912.0)
# log2(448): softmax weights are multiplied by 448, e4m3's largest number, to use its whole range.
_E4M3_TOP = gl.constexpr(8.807354922057604)


@gluon.jit
def attend_blocks(
    buffers, full, free, turns, numbers, rows, last, y, top, done, own, whole, steps,
    KIND: gl.constexpr, HALF: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    LOGITS: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """Run an online softmax of 64 rows over `steps` key blocks of BN keys.

    The first `whole` blocks are visible to all queries and need no mask.

    Args:
        buffers, full, free: tuples of the buffers and barriers of Q, K and V, as in `load_tiles`.
        turns: barriers by which the two warpgroups take turns.
        numbers: scale, log2(e), and the largest magnitude of a shifted logit's code, for quantized logits.
        rows: result of `load_row_scales` for quantized logits; scales of the rows and of the key blocks for 8-bit
            codes; else the scale of all logits.
        last: number of visible keys of each row.
        y: tuple of zero accumulators [64, channels], one for each part of V's channels; more than one part only for
            8-bit codes.
        top: initial running maximum of each row.
        done: number of blocks that the warpgroup has processed.
        own: number of maps that it has processed. It has taken `done + own` turns, one more for each map than it has
            blocks.
        KIND: three flags: logits are quantized, logits are shifted, Q and K are 8-bit codes.
        HALF: index of the warpgroup, 0 or 1.
        STAGES: number of buffers of K and of V.
        LOGITS, VALUES: register layouts of logits and of accumulators.

    Returns:
        Weighted sums of values as in `y`, sums of weights [64], and number of clipped logits of each row [64].
    """
    total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, LOGITS))
    below = gl.full([64], 0, gl.int32, gl.SliceLayout(1, LOGITS))
    if KIND[2]:
        _take_turn(turns, done + own, HALF)
        y, top, total = _attend_codes(
            buffers, full, free, turns, rows, last, y, top, total, done, own, 0, whole, steps,
            False, KIND, HALF, BN, STAGES, LOGITS, VALUES,
        )  # fmt: skip
        y, top, total = _attend_codes(
            buffers, full, free, turns, rows, last, y, top, total, done, own, whole, steps, steps,
            True, KIND, HALF, BN, STAGES, LOGITS, VALUES,
        )  # fmt: skip
        _pass_turn(turns, HALF)
    elif steps > 0:
        stage = done % STAGES
        unit = _logit_unit(rows, 0, KIND)
        mbarrier.wait(full[1].index(stage), done // STAGES & 1)
        _take_turn(turns, done + own, HALF)
        logits = _ask_logits(buffers, stage, HALF, BN, KIND, LOGITS)
        _pass_turn(turns, HALF)
        logits = warpgroup_mma_wait(0, deps=[logits])
        mbarrier.arrive(free[1].index(stage), count=1)
        p, top, total, below, _ = _weigh(
            logits, unit, numbers, rows, last, top, total, below, 0, True, KIND, BN, LOGITS
        )
        weights = _as_operand(p, buffers[2].dtype, BN, KIND, VALUES)
        y, top, total, below, weights = _attend_steps(
            buffers, full, free, turns, numbers, rows, last, y, top, total, below, weights, done, own, 1, whole,
            False, KIND, HALF, BN, STAGES, LOGITS, VALUES,
        )  # fmt: skip
        y, top, total, below, weights = _attend_steps(
            buffers, full, free, turns, numbers, rows, last, y, top, total, below, weights, done, own,
            gl.maximum(whole, 1), steps, True, KIND, HALF, BN, STAGES, LOGITS, VALUES,
        )  # fmt: skip
        stage = (done + steps - 1) % STAGES
        mbarrier.wait(full[2].index(stage), (done + steps - 1) // STAGES & 1)
        _take_turn(turns, done + own + steps, HALF)
        sums = warpgroup_mma(weights, buffers[2].index(stage), y[0], is_async=True)
        _pass_turn(turns, HALF)
        sums, weights = warpgroup_mma_wait(0, deps=[sums, weights])
        y = (sums,)
        mbarrier.arrive(free[2].index(stage), count=1)
    return y, total, below


@gluon.jit
def load_row_scales(top, steps_of_codes, row_at, inside, SHIFT: gl.constexpr, ROWS: gl.constexpr):
    """Load the largest logit and the quantization scale of 64 rows.

    Args:
        top, steps_of_codes: pointers to largest logits and to scales.
        row_at, inside: indices of the rows, and whether each of them exists.
        SHIFT: whether logits are shifted.
        ROWS: register layout of the results.

    Returns:
        largest logit, scale, 1 / scale, and code of the largest logit, 0 if logits are shifted. Rounding is
        monotonic, so this is the row's largest code.
    """
    largest = gl.load(top + row_at, mask=inside, other=0.0)
    step = gl.load(steps_of_codes + row_at, mask=inside, other=1.0)
    inverse = gl.div_rn(gl.full([64], 1.0, gl.float32, ROWS), step)
    code = largest * 0.0 if SHIFT else (_quotient(largest, step, inverse) + _ROUND) - _ROUND
    return largest, step, inverse, code


@gluon.jit
def _attend_steps(
    buffers, full, free, turns, numbers, rows, last, y, top, total, below, weights, done, own, begin, stop,
    MASKED: gl.constexpr, KIND: gl.constexpr, HALF: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    LOGITS: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """Process key blocks `begin` to `stop`, except P·V of the last; return accumulators, maxima, sums and weights."""
    ROUNDED: gl.constexpr = KIND[0]
    for step in range(begin, stop):
        stage = (done + step) % STAGES
        before = (done + step - 1) % STAGES
        unit = _logit_unit(rows, step, KIND)
        mbarrier.wait(full[1].index(stage), (done + step) // STAGES & 1)
        mbarrier.wait(full[2].index(before), (done + step - 1) // STAGES & 1)
        _take_turn(turns, done + own + step, HALF)
        logits = _ask_logits(buffers, stage, HALF, BN, KIND, LOGITS)
        sums = warpgroup_mma(weights, buffers[2].index(before), y[0], is_async=True)
        _pass_turn(turns, HALF)
        logits = warpgroup_mma_wait(1, deps=[logits])
        mbarrier.arrive(free[1].index(stage), count=1)
        p, top, total, below, shrunk = _weigh(
            logits, unit, numbers, rows, last, top, total, below, step, MASKED, KIND, BN, LOGITS
        )
        ready = _as_operand(p, buffers[2].dtype, BN, KIND, VALUES)
        # The loop that waits for the next keys ends the basic block. Otherwise the assembler, which schedules within a
        # basic block, would move the wait below before the exponentials.
        if step + 1 < stop:
            mbarrier.wait(full[1].index((done + step + 1) % STAGES), (done + step + 1) // STAGES & 1)
        # Registers of the old weights are in use by the product until it is done.
        sums, weights, ready, shrunk = warpgroup_mma_wait(0, deps=[sums, weights, ready, shrunk])
        mbarrier.arrive(free[2].index(before), count=1)
        if not ROUNDED:
            sums *= gl.convert_layout(shrunk, gl.SliceLayout(1, VALUES))[:, None]
        y = (sums,)
        weights = ready
    return y, top, total, below, weights


@gluon.jit
def _attend_codes(
    buffers, full, free, turns, rows, last, y, top, total, done, own, begin, stop, steps,
    MASKED: gl.constexpr, KIND: gl.constexpr, HALF: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    LOGITS: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """Process key blocks `begin` to `stop` of 8-bit codes; return accumulators, maxima and sums.

    A turn computes PV of a block and starts QK of the next; it begins and ends outside this function. No product is
    left running, since Triton would keep each of its 8-bit weights in a separate register.
    """
    DH: gl.constexpr = y[0].shape[1]
    for step in range(begin, stop):
        stage = (done + step) % STAGES
        phase = (done + step) // STAGES & 1
        unit = _logit_unit(rows, step, KIND)
        mbarrier.wait(full[1].index(stage), phase)
        logits = _ask_logits(buffers, stage, HALF, BN, KIND, LOGITS)
        _pass_turn(turns, HALF)
        logits = warpgroup_mma_wait(0, deps=[logits])
        mbarrier.arrive(free[1].index(stage), count=1)
        p, top, total, _, shrunk = _weigh(
            logits, unit, (0.0, 0.0, 0.0), rows, last, top, total, 0, step, MASKED, KIND, BN, LOGITS
        )
        weights = _as_operand(p, buffers[2].dtype, BN, KIND, VALUES)
        shrunk = gl.convert_layout(shrunk, gl.SliceLayout(1, VALUES))[:, None]
        # All that the turn reads is waited for before it. A branch for the last block, which has no next, would make
        # Triton keep each weight in a separate register. It waits for its own keys again, which returns at once: Q is
        # not free yet, so the next map's keys do not come.
        following = done + gl.minimum(step + 1, steps - 1)
        mbarrier.wait(full[1].index(following % STAGES), following // STAGES & 1)
        mbarrier.wait(full[2].index(stage), phase)
        _take_turn(turns, done + own + step + 1, HALF)
        # Sums over a block's keys are accumulated outside the tensor cores, whose additions keep about 14 bits: up to
        # 2 % off over 4,096 terms (arXiv 2412.19437, section 3.3.2).
        sums = ()
        for part in gl.static_range(len(y)):
            nothing = gl.full([64, DH], 0.0, gl.float32, VALUES)
            values = buffers[2].index(stage).slice(part * DH, DH).permute((1, 0))
            product = warpgroup_mma(weights, values, nothing, use_acc=False, is_async=True)
            sums += (y[part] * shrunk + warpgroup_mma_wait(0, deps=[product]),)
        y = sums
        mbarrier.arrive(free[2].index(stage), count=1)
    return y, top, total


@gluon.jit
def _take_turn(turns, number, HALF: gl.constexpr):
    """Wait until the other warpgroup has started its products; warpgroup 0 takes the first turn."""
    mbarrier.wait(turns.index(HALF), (number & 1) ^ (1 - HALF))


@gluon.jit
def _pass_turn(turns, HALF: gl.constexpr):
    """Allow the other warpgroup to start its products."""
    mbarrier.arrive(turns.index(1 - HALF), count=1)


@gluon.jit
def _ask_logits(buffers, stage, HALF: gl.constexpr, BN: gl.constexpr, KIND: gl.constexpr, LOGITS: gl.constexpr):
    """Start the product that computes the logits [64, BN] of a block."""
    nothing = gl.full([64, BN], 0, gl.int32 if KIND[2] else gl.float32, LOGITS)
    q = buffers[0].slice(64 * HALF, 64)
    return warpgroup_mma(q, buffers[1].index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _as_operand(p, dtype: gl.constexpr, BN: gl.constexpr, KIND: gl.constexpr, VALUES: gl.constexpr):
    """Convert softmax weights to the layout and dtype of a product's left operand."""
    weights = p.to(dtype)
    if KIND[2]:
        # In the order of `quantize_qkv.swizzle`, a thread holds the same entries of the result and of the operand.
        weights = weights.reshape([64, BN // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([64, BN])
    return gl.convert_layout(weights, gl.DotOperandLayout(0, VALUES, 4 if KIND[2] else 2))


@gluon.jit
def _logit_unit(rows, step, KIND: gl.constexpr):
    """Return the factor of a block's logits: one for all rows, or one per row."""
    return rows[0] * gl.load(rows[1] + step) if KIND[2] else rows[0]


@gluon.jit
def _weigh(
    logits, unit, numbers, rows, last, top, total, below, step,
    MASKED: gl.constexpr, KIND: gl.constexpr, BN: gl.constexpr, LOGITS: gl.constexpr,
):  # fmt: skip
    """Compute a block's weights [64, BN]; update maxima, sums and clipped counts; return the factor of earlier sums."""
    ROUNDED: gl.constexpr = KIND[0]
    SHIFT: gl.constexpr = KIND[1]
    CODES: gl.constexpr = KIND[2]
    if MASKED:
        key = step * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, LOGITS))
        seen = key[None, :] < last[:, None]
    if ROUNDED:
        scale, log2e, levels = numbers
        largest, step_of_codes, inverse, code = rows
        logits *= scale
        if SHIFT:
            logits -= largest[:, None]
            # Counted before the codes are made: keeping logits until after them would take more registers.
            under = logits < (-(levels + 0.5) * step_of_codes)[:, None]
            if MASKED:
                under = under & seen
            below += gl.sum(under.to(gl.int32), 1)
        codes = _quotient(logits, step_of_codes[:, None], inverse[:, None]) + _ROUND
        if SHIFT:
            codes = gl.maximum(codes - _ROUND, -1.0 * levels)
        else:
            codes -= (code + _ROUND)[:, None]
        p = gl.exp2(codes * (step_of_codes * log2e)[:, None])
        if MASKED:
            p = gl.where(seen, p, 0.0)
        total += gl.sum(p, 1)
        shrunk = total
    else:
        LIFT: gl.constexpr = _E4M3_TOP if CODES else 0.0
        if CODES:
            logits = logits.to(gl.float32)
            factor = unit[:, None]
        else:
            factor = unit
        if MASKED:
            logits = gl.where(seen, logits * factor, -float("inf"))
            risen = gl.maximum(top, gl.max(logits, 1))
            p = gl.exp2(logits - (risen - LIFT)[:, None])
        else:
            risen = gl.maximum(top, gl.max(logits, 1) * unit)
            p = gl.exp2(logits * factor - (risen - LIFT)[:, None])
        shrunk = gl.exp2(top - risen)
        top = risen
        total = total * shrunk + gl.sum(p, 1)
    return p, top, total, below, shrunk


@gluon.jit
def _quotient(x, step, inverse):
    """Compute x / step, correctly rounded as in IEEE division; `inverse` is the correctly rounded 1 / step."""
    guess = x * inverse
    return gl.fma(gl.fma(-guess, step, x), inverse, guess)
