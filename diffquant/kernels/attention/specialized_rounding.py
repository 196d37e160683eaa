"""Attention over blocks of keys with logits rounded to codes, for a warpgroup of a specialized kernel (Gluon).

The arithmetic of a logit is that of `attend_rounded`, operation by operation, so that it falls on the same code.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="attr-defined"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

# Adding and subtracting 1.5·2^23 rounds a float32 to an integer, half to even.
_ROUND = gl.constexpr(12582912.0)


@gluon.jit
def quotient(x, step, inverse):
    """Quotient x / step as IEEE division rounds it, where `inverse` is 1 / step so rounded."""
    guess = x * inverse
    return gl.fma(gl.fma(-guess, step, x), inverse, guess)


@gluon.jit
def row_codes(top, steps_of_codes, row_at, inside, SHIFT: gl.constexpr, ROWS: gl.constexpr):
    """A row's largest logit, its scale and that one's inverse, and the code that its largest logit has.

    Rounding keeps order, so the largest code is known beforehand; of shifted logits it is 0.
    """
    largest = gl.load(top + row_at, mask=inside, other=0.0)
    step = gl.load(steps_of_codes + row_at, mask=inside, other=1.0)
    inverse = gl.div_rn(gl.full([64], 1.0, gl.float32, ROWS), step)
    code = largest * 0.0 if SHIFT else (quotient(largest, step, inverse) + _ROUND) - _ROUND
    return largest, step, inverse, code


@gluon.jit
def attend_rounded_blocks(
    buffers, full, free, scale, codes_of_rows, last, y, total, below, log2e, levels, done, begin, stop,
    MASKED: gl.constexpr, SHIFT: gl.constexpr, HALF: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    LOGITS: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """Values, weights and clipped logits of rows after the key blocks from `begin` up to `stop` more."""
    largest, step_of_codes, inverse, code = codes_of_rows
    unit = (step_of_codes * log2e)[:, None]
    floor = (-(levels + 0.5) * step_of_codes)[:, None]
    q = buffers[0].slice(64 * HALF, 64)
    for step in range(begin, stop):
        stage = (done + step) % STAGES
        phase = (done + step) // STAGES & 1
        mbarrier.wait(full[1].index(stage), phase)
        nothing = gl.full([64, BN], 0.0, gl.float32, LOGITS)
        logits = warpgroup_mma(q, buffers[1].index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        logits = warpgroup_mma_wait(0, deps=[logits]) * scale
        mbarrier.arrive(free[1].index(stage), count=1)
        if SHIFT:
            logits -= largest[:, None]
        codes = quotient(logits, step_of_codes[:, None], inverse[:, None]) + _ROUND
        if SHIFT:
            codes = gl.maximum(codes - _ROUND, -1.0 * levels)
        else:
            codes -= (code + _ROUND)[:, None]
        p = gl.exp2(codes * unit)
        if MASKED:
            key = step * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, LOGITS))
            seen = key[None, :] < last[:, None]
            p = gl.where(seen, p, 0.0)
        if SHIFT:
            under = logits < floor
            if MASKED:
                under = under & seen
            below += gl.sum(under.to(gl.int32), 1)
        total += gl.sum(p, 1)
        values = buffers[2].index(stage)
        weights = gl.convert_layout(p.to(values.dtype), gl.DotOperandLayout(0, VALUES, 2))
        mbarrier.wait(full[2].index(stage), phase)
        y = warpgroup_mma(weights, values, y, is_async=True)
        y = warpgroup_mma_wait(0, deps=[y])
        mbarrier.arrive(free[2].index(stage), count=1)
    return y, total, below
