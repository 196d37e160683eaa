"""Attention over blocks of keys with an online softmax, for a warpgroup of a specialized kernel (Gluon)."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="attr-defined"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def softmax_of_block(
    logits, scale, last, top, total, step, MASKED: gl.constexpr, BN: gl.constexpr, LOGITS: gl.constexpr
):
    """Weights of a block's keys, the rows' maxima and sums with them, and the factor for what stood before."""
    if MASKED:
        key = step * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, LOGITS))
        logits = gl.where(key[None, :] < last[:, None], logits, -float("inf"))
    risen = gl.maximum(top, gl.max(logits, 1) * scale)
    p = gl.exp2(logits * scale - risen[:, None])
    shrunk = gl.exp2(top - risen)
    return p, risen, total * shrunk + gl.sum(p, 1), shrunk


@gluon.jit
def attend_softmax_blocks(
    buffers, full, free, scale, last, y, top, total, done, begin, stop,
    MASKED: gl.constexpr, HALF: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    LOGITS: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """State of an online softmax after the key blocks from `begin` up to `stop` more."""
    q = buffers[0].slice(64 * HALF, 64)
    for step in range(begin, stop):
        stage = (done + step) % STAGES
        phase = (done + step) // STAGES & 1
        mbarrier.wait(full[1].index(stage), phase)
        nothing = gl.full([64, BN], 0.0, gl.float32, LOGITS)
        logits = warpgroup_mma(q, buffers[1].index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        logits = warpgroup_mma_wait(0, deps=[logits])
        mbarrier.arrive(free[1].index(stage), count=1)
        p, top, total, shrunk = softmax_of_block(logits, scale, last, top, total, step, MASKED, BN, LOGITS)
        y = y * gl.convert_layout(shrunk, gl.SliceLayout(1, VALUES))[:, None]
        values = buffers[2].index(stage)
        weights = gl.convert_layout(p.to(values.dtype), gl.DotOperandLayout(0, VALUES, 2))
        mbarrier.wait(full[2].index(stage), phase)
        y = warpgroup_mma(weights, values, y, is_async=True)
        y = warpgroup_mma_wait(0, deps=[y])
        mbarrier.arrive(free[2].index(stage), count=1)
    return y, top, total
