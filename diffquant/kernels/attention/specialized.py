"""Shared parts of warp-specialized attention for Hopper (Gluon): loads, the tile's keys, and the end of a row.

One warp loads. Two warpgroups have 64 rows each and loops of their own, so that one computes softmax while the other
multiplies. V1's maps follow one another, each warpgroup with 64 queries; V2's share their keys, so that one warpgroup
has the signal map of 64 queries and the other their noise map. A noise map waits in the output's own memory, in fp16.

Each buffer has a barrier that says it is full and one that says it is free. The n-th use of one of S buffers waits for
the barriers' (n / S)-th phase.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="attr-defined"
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# A finite floor for row maxima: -inf less -inf would be NaN where a row sees nothing yet. Hidden logits are -inf: a
# finite one times the scale, less itself, is a fused multiply-add's rounding error, whose exponential may be infinite.
LOWEST = gl.constexpr(-1.0e30)
_FP16_MAX = gl.constexpr(65504.0)
_NAN_STAYS = gl.constexpr(tl.PropagateNan.ALL)
# Triton 3.6 has the one name, newer ones the other.
_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def new_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers [COUNT, 1] that complete a phase after ARRIVALS arrivals; make none that no partition uses.

    Triton puts what partitions are handed into the memory of barriers that nothing uses. On an H100 partitions then
    looped for ever now and then, as if a barrier's initial state had been read for a number of steps.
    """
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def load_tiles(
    q_sources, k_sources, v_source, q_rows, q_columns, k_rows, buffers, full, free, steps,
    PASSES: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Bring Q once a pass, and K and V of every step, as their buffers become free.

    Args:
        q_sources, q_rows, q_columns: descriptors and places of Q, two of 64 rows a pass.
        k_sources, k_rows: descriptors and first rows of K, one a pass; `v_source` is V's descriptor.
        buffers, full, free: tuples of those of Q, K and V.
        steps: steps of BN keys a pass.
        TRANSPOSED: whether V lies [values, keys].
        BYTES: bytes of a tile of Q, K and V.
    """
    done = 0
    for own in gl.static_range(PASSES):
        mbarrier.wait(free[0].index(0), own % 2 ^ 1)
        mbarrier.expect(full[0].index(0), BYTES[0])
        for half in gl.static_range(2):
            q_at = [q_rows[2 * own + half], q_columns[2 * own + half]]
            _load(q_sources[2 * own + half], q_at, full[0].index(0), buffers[0].slice(64 * half, 64))
        for step in range(steps):
            stage = done % STAGES
            phase = done // STAGES & 1
            mbarrier.wait(free[1].index(stage), phase ^ 1)
            mbarrier.expect(full[1].index(stage), BYTES[1])
            _load(k_sources[own], [k_rows[own] + step * BN, 0], full[1].index(stage), buffers[1].index(stage))
            mbarrier.wait(free[2].index(stage), phase ^ 1)
            mbarrier.expect(full[2].index(stage), BYTES[2])
            v_at = [0, step * BN] if TRANSPOSED else [step * BN, 0]
            _load(v_source, v_at, full[2].index(stage), buffers[2].index(stage))
            done += 1


@gluon.jit
def valid_keys(starts, ends, sequence, S):
    """First valid position of a sequence and the number of valid ones, inside the tensor whatever the limits say."""
    start = 0
    end = S
    if starts is not None:
        start = gl.minimum(gl.maximum(gl.load(starts + sequence), 0), S)
    if ends is not None:
        end = gl.minimum(gl.maximum(gl.load(ends + sequence), start), S)
    return start, end - start


@gluon.jit
def key_steps(position, queries, valid, BN: gl.constexpr):
    """Steps of BN keys that each of some queries sees all of, and those that any of them sees.

    The first query stands at `position` among the valid keys; under causal order each sees keys up to its own.
    """
    stop = gl.where(position < valid, gl.maximum(gl.minimum(position + queries, valid), 0), 0)
    return gl.minimum(gl.maximum(position + 1, 0), stop) // BN, gl.cdiv(stop, BN)


@gluon.jit
def waits_for_signal(own, T, HALF: gl.constexpr, MAPS: gl.constexpr, PACK: gl.constexpr):
    """Whether a warpgroup's rows are of a noise map, which the signal map's take theirs less.

    Maps that share keys, or a lone one, say so by T, which is positive, since Triton 3.6 compiles no store of rows that
    stands in a partition without a condition at run time.
    """
    if MAPS > 1:
        waits = own + 1 < MAPS
    elif PACK * HALF == 2:
        waits = T > 0
    else:
        waits = T < 0
    return waits


@gluon.jit
def park(y, places, kept):
    """Keep a map's rows in fp16, whatever the output's type: bfloat16 would lose what the difference keeps."""
    floor = gl.maximum(y, -_FP16_MAX, propagate_nan=_NAN_STAYS)
    gl.store(places, gl.minimum(floor, _FP16_MAX, propagate_nan=_NAN_STAYS).to(gl.float16), mask=kept)


@gluon.jit
def less_parked(y, places, kept, lam):
    """Rows less λ times those that wait. The thread that parked an entry, or its twin, reads it."""
    return y - lam[:, None] * gl.load(places, mask=kept, other=0.0).to(gl.float32)


@gluon.jit
def keep(y, squares, places, kept, weight, column, eps, factor, NORM: gl.constexpr, WIDTH: gl.constexpr):
    """Store rows, after the pair norm where the model has one.

    `squares` are the rows' sums over WIDTH values, and `column` is where those of `y` stand among them.
    """
    if NORM:
        y = y * (gl.rsqrt(squares / WIDTH + eps) * factor)[:, None]
        if weight is not None:
            y = y * gl.load(weight + column).to(gl.float32)[None, :]
    gl.store(places, y.to(places.dtype.element_ty), mask=kept)
