"""Shared parts of warp-specialized attention for Hopper (Gluon): loads, key ranges, and storing of rows.

One warp loads. Two warpgroups have 64 rows each and separate loops, so that one computes softmax while the other
multiplies. V1's maps are computed one after the other, and each warpgroup has 64 queries. V2's maps share keys, so one
warpgroup has the signal map of 64 queries and the other their noise map. A noise map is stored in the output's memory,
in fp16, until it is subtracted.

Each buffer has one barrier for being full and one for being free. The n-th use of one of S buffers waits for phase
n / S of its barriers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="attr-defined"
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Finite lower bound of row maxima: -inf minus -inf would be NaN for rows that have seen no key yet. Hidden logits must
# be -inf: with a finite number, the fused multiply-add of logit · scale - maximum would leave its rounding error, whose
# exponential may be infinite.
LOWEST = gl.constexpr(-1.0e30)
_FP16_MAX = gl.constexpr(65504.0)
_NAN_STAYS = gl.constexpr(tl.PropagateNan.ALL)
# The name differs between Triton 3.6 and newer versions.
_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def new_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate barriers [COUNT, 1] that complete a phase after ARRIVALS arrivals. Each barrier must be used.

    PTX allows only mbarrier operations on a valid mbarrier's memory until `mbarrier.inval`. Triton does not invalidate
    barriers and reuses the memory of unused ones for the partitions' arguments; some launches on an H100 then hung.
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
    """Load Q once per pass (map), and K and V of every step, as soon as their buffers are free.

    Args:
        q_sources, q_rows, q_columns: TMA descriptors and positions of Q, two tiles of 64 rows per pass.
        k_sources, k_rows: TMA descriptors and first rows of K, one per pass.
        v_source: TMA descriptor of V.
        buffers, full, free: tuples of the buffers and barriers of Q, K and V.
        steps: number of steps of BN keys per pass.
        TRANSPOSED: whether V has the shape [channels, keys].
        BYTES: sizes of a tile of Q, K and V in bytes.
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
def valid_range(starts, ends, sequence, S):
    """Return a sequence's first valid position and its number of valid positions, both limited by the length S."""
    start = 0
    end = S
    if starts is not None:
        start = gl.minimum(gl.maximum(gl.load(starts + sequence), 0), S)
    if ends is not None:
        end = gl.minimum(gl.maximum(gl.load(ends + sequence), start), S)
    return start, end - start


@gluon.jit
def count_key_steps(position, queries, valid, BN: gl.constexpr):
    """Return how many steps of BN keys all of a tile's queries see in full, and how many some query sees.

    The first query is at `position` among the valid keys; each query sees the keys up to its own.
    """
    stop = gl.where(position < valid, gl.maximum(gl.minimum(position + queries, valid), 0), 0)
    return gl.minimum(gl.maximum(position + 1, 0), stop) // BN, gl.cdiv(stop, BN)


@gluon.jit
def is_noise_map(own, T, HALF: gl.constexpr, MAPS: gl.constexpr, PACK: gl.constexpr):
    """Return whether a warpgroup computes a noise map, which is stored and later subtracted from the signal map.

    If maps have separate keys (MAPS = 2), it does in its first pass, where `own` is 0. If they share keys (PACK = 2),
    the second warpgroup does, for which HALF is 1.

    Except with separate keys, the result is written as a comparison of T, the positive number of queries. Triton 3.6
    cannot compile an unconditional store of rows inside a partition, so the condition must not be constant.
    """
    if MAPS > 1:
        waits = own + 1 < MAPS
    elif PACK * HALF == 2:
        waits = T > 0
    else:
        waits = T < 0
    return waits


@gluon.jit
def store_noise_rows(y, places, kept):
    """Store a noise map's rows y in fp16 at the pointers `places` where `kept` is true.

    The output's dtype does not matter here; in bfloat16 the difference of the maps would lose precision.
    """
    floor = gl.maximum(y, -_FP16_MAX, propagate_nan=_NAN_STAYS)
    gl.store(places, gl.minimum(floor, _FP16_MAX, propagate_nan=_NAN_STAYS).to(gl.float16), mask=kept)


@gluon.jit
def subtract_noise_rows(y, places, kept, lam):
    """Return y minus λ times the noise rows stored at the pointers `places`, or y where `kept` is false.

    Each entry must be read by the thread that stored it.
    """
    return y - lam[:, None] * gl.load(places, mask=kept, other=0.0).to(gl.float32)


@gluon.jit
def store_rows(y, squares, places, kept, weight, column, eps, factor, NORM: gl.constexpr, WIDTH: gl.constexpr):
    """Store rows y at the pointers `places` where `kept` is true, after the pair norm if NORM.

    `squares` are the rows' sums of squares over all WIDTH channels; `column` are the channel indices of y.
    """
    if NORM:
        y = y * (gl.rsqrt(squares / WIDTH + eps) * factor)[:, None]
        if weight is not None:
            y = y * gl.load(weight + column).to(gl.float32)[None, :]
    gl.store(places, y.to(places.dtype.element_ty), mask=kept)
