"""The loop of `specialized_softmax` pipelined (Gluon): a block's QK runs while softmax has the block before it.

A step asks for QK of its block and for PV of the block before, and computes softmax once QK has come: PV then runs
meanwhile. The two warpgroups take turns at asking, so that one computes softmax while the other's products run. This is
how FlashAttention-3 overlaps (arXiv 2407.08608, sections 3.1 and 3.2), with mbarriers as the turns.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="attr-defined"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from diffquant.kernels.attention.specialized_softmax import softmax_of_block


@gluon.jit
def take_turn(turns, number, HALF: gl.constexpr):
    """Wait until the other warpgroup asked for the products of its turn. The first half's first turn is the first."""
    mbarrier.wait(turns.index(HALF), (number & 1) ^ (1 - HALF))


@gluon.jit
def pass_turn(turns, HALF: gl.constexpr):
    """Let the other warpgroup ask for products."""
    mbarrier.arrive(turns.index(1 - HALF), count=1)


@gluon.jit
def attend_softmax_pipelined(
    buffers, full, free, turns, scale, last, y, top, total, done, own, whole, steps,
    HALF: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, LOGITS: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """State of an online softmax after `steps` key blocks, of which all queries see the first `whole`.

    `done` blocks and `own` maps came before: a map takes a turn more than it has blocks.
    """
    if steps > 0:
        stage = done % STAGES
        mbarrier.wait(full[1].index(stage), done // STAGES & 1)
        take_turn(turns, done + own, HALF)
        q = buffers[0].slice(64 * HALF, 64)
        nothing = gl.full([64, BN], 0.0, gl.float32, LOGITS)
        logits = warpgroup_mma(q, buffers[1].index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        pass_turn(turns, HALF)
        logits = warpgroup_mma_wait(0, deps=[logits])
        mbarrier.arrive(free[1].index(stage), count=1)
        p, top, total, _ = softmax_of_block(logits, scale, last, top, total, 0, True, BN, LOGITS)
        weights = gl.convert_layout(p.to(buffers[2].dtype), gl.DotOperandLayout(0, VALUES, 2))
        y, top, total, weights = _blocks(
            buffers, full, free, turns, scale, last, y, top, total, weights, done, own, 1, whole,
            False, HALF, BN, STAGES, LOGITS, VALUES,
        )  # fmt: skip
        y, top, total, weights = _blocks(
            buffers, full, free, turns, scale, last, y, top, total, weights, done, own, gl.maximum(whole, 1), steps,
            True, HALF, BN, STAGES, LOGITS, VALUES,
        )  # fmt: skip
        stage = (done + steps - 1) % STAGES
        mbarrier.wait(full[2].index(stage), (done + steps - 1) // STAGES & 1)
        take_turn(turns, done + own + steps, HALF)
        y = warpgroup_mma(weights, buffers[2].index(stage), y, is_async=True)
        pass_turn(turns, HALF)
        y, weights = warpgroup_mma_wait(0, deps=[y, weights])
        mbarrier.arrive(free[2].index(stage), count=1)
    return y, top, total


@gluon.jit
def _blocks(
    buffers, full, free, turns, scale, last, y, top, total, weights, done, own, begin, stop,
    MASKED: gl.constexpr, HALF: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    LOGITS: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """State after the key blocks from `begin` up to `stop`, but for the values of the last, whose weights wait."""
    q = buffers[0].slice(64 * HALF, 64)
    for step in range(begin, stop):
        stage = (done + step) % STAGES
        before = (done + step - 1) % STAGES
        mbarrier.wait(full[1].index(stage), (done + step) // STAGES & 1)
        mbarrier.wait(full[2].index(before), (done + step - 1) // STAGES & 1)
        take_turn(turns, done + own + step, HALF)
        nothing = gl.full([64, BN], 0.0, gl.float32, LOGITS)
        logits = warpgroup_mma(q, buffers[1].index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        y = warpgroup_mma(weights, buffers[2].index(before), y, is_async=True)
        pass_turn(turns, HALF)
        logits = warpgroup_mma_wait(1, deps=[logits])
        mbarrier.arrive(free[1].index(stage), count=1)
        p, top, total, shrunk = softmax_of_block(logits, scale, last, top, total, step, MASKED, BN, LOGITS)
        ready = gl.convert_layout(p.to(buffers[2].dtype), gl.DotOperandLayout(0, VALUES, 2))
        # The old weights' registers are the product's until it is done. The new ones are named as well, since the
        # compiler would otherwise compute them behind the wait.
        y, weights, ready, shrunk = warpgroup_mma_wait(0, deps=[y, weights, ready, shrunk])
        mbarrier.arrive(free[2].index(before), count=1)
        y = y * gl.convert_layout(shrunk, gl.SliceLayout(1, VALUES))[:, None]
        weights = ready
    return y, top, total, weights
