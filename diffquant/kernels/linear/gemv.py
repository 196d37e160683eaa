"""GEMV y = x · Wᵀ with packed weights for a few tokens: weights are read once and unpacked for tensor cores (Triton).

A thread block computes 16 outputs. K is divided among its warps, whose sums are added in a fixed order through shared
memory. Threads load words and x directly into the registers of their fragments, so the loop uses neither shared memory
nor barriers. Codes are exact in the products; group scales multiply float32 sums.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment, var-annotated"
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from diffquant.kernels.configs import Config, choose_config
from diffquant.kernels.gpu import compute_capability, device_class, multiprocessors, registers_per_thread
from diffquant.kernels.linear.repack import FRAGMENT, PackedWeight, codes_per_word
from diffquant.kernels.linear.unpacking import decode_scale, load_high, unpack_field

MOST_TOKENS = 8
# Largest number of steps per row block if words are loaded ahead. These steps are unrolled, and more of them spill.
_MOST_STEPS = 2


# Fields of a configuration: number of warps; `unroll`, the largest number of chunks of 512 bytes that a warp loads
# before it uses the first; number of thread blocks per multiprocessor (registers per thread are limited accordingly);
# `ahead`, the largest number of chunks that are loaded while as many are used, if there are more row blocks than the
# device can run at once, or 0 if registers cannot hold both.
# 8 warps with 6 to 8 chunks load 24 to 32 KB per thread block. With 3,072 columns at 4 bits this is all, so that a
# block waits for memory once. 4-bit words can all wait in registers while the preceding kernel ends; 6-bit codes, in
# two planes, cannot.
_BLOCKS_AND_AHEAD = {4: (2, 4), 6: (2, 0), 8: (4, 0)}
TILES = {
    f"gemv/{device}/{bits}": {"warps": 8, "unroll": 8, "blocks": blocks, "ahead": ahead}
    for device in ("sm_80", "sm_90")
    for bits, (blocks, ahead) in _BLOCKS_AND_AHEAD.items()
}


def launch_gemv(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Compute x · Wᵀ + bias [M, N] of x [M, K], contiguous along K with M up to 8, and a packed weight."""
    tokens, width = x.shape
    rows = weight.shape[0]
    blocks, chunks, _ = weight.low.shape
    device = device_class(x.device)
    tile = choose_config(TILES, f"gemv/{device}/{weight.bits}")
    # From Hopper on, thread blocks may start while the preceding kernel still runs (programmatic dependent launch).
    is_dependent = compute_capability(x.device) >= (9, 0)
    slots = multiprocessors(x.device) * tile["blocks"]
    steps, unroll = _steps(chunks, tile, blocks > slots)
    # Where all slots are taken, as many registers stay free as one of the next kernel's blocks needs to start on a
    # multiprocessor and load its first words. For Hopper groups of 16 would spill, others at most three words per step.
    leaves_room = steps > 0 and weight.group != 16 and device == "sm_90"
    y = x.new_empty(tokens, rows)
    _gemv[(min(blocks, slots) if steps else blocks, 1)](
        x, weight.low, weight.high, weight.scales, weight.row_scale, bias, y,
        tokens, rows, width, blocks, chunks, x.stride(0), int(len(weight.row_scale) > 1),
        **weight.layout, WARPS=tile["warps"], UNROLL=unroll, STEPS=steps,
        EVEN=chunks % (tile["warps"] * unroll) == 0 and width == chunks * FRAGMENT * codes_per_word(weight.bits),
        DEPENDENT=is_dependent, num_warps=tile["warps"], num_stages=1, enable_fp_fusion=True,
        maxnreg=registers_per_thread(tile["blocks"] + leaves_room, tile["warps"]),
        **({"launch_pdl": True} if is_dependent else {}),
    )  # fmt: skip
    return y


def _steps(chunks: int, tile: Config, ahead: bool) -> tuple[int, int]:
    """Return the steps per row block and the chunks per step and warp; 0 steps if words are not loaded ahead."""
    even = [n for n in range(1, tile["ahead"] + 1) if chunks % (tile["warps"] * n) == 0] if ahead else []
    steps = chunks // (tile["warps"] * max(even)) if even else 0
    return (steps, max(even)) if 1 <= steps <= _MOST_STEPS else (0, _unroll(chunks, tile))


def _unroll(chunks: int, tile: Config) -> int:
    """Return the number of chunks per warp to load at once: the largest that divides K, since remainders need masks."""
    even = [n for n in range(1, tile["unroll"] + 1) if chunks % (tile["warps"] * n) == 0]
    return max(even, default=min(tile["unroll"], triton.cdiv(chunks, tile["warps"])))


@triton.jit(do_not_specialize=["M", "row_scale_stride"])
def _gemv(
    x, low, high, scales, row_scale, bias, y,
    M, N, K, blocks, chunks, x_stride, row_scale_stride,
    BITS: tl.constexpr, FLOATS: tl.constexpr, FIELDS: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
    WARPS: tl.constexpr, UNROLL: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute blocks of 16 columns of y [M, N]; M is at most 8.

    With STEPS, a program computes every block whose index is its own modulo the number of programs and loads words one
    step ahead; otherwise it computes one block.
    """
    if DEPENDENT:
        # The next kernel may start now: it either waits for this one or was not launched as a dependent kernel.
        gdc_launch_dependents()
        if BITS == 6:
            # With two planes of codes there are no registers to load words before waiting.
            gdc_wait()
    first_block = tl.program_id(0)
    # Always 1. If the compiler knew, threads would load more contiguous elements than their fragments need.
    one = tl.num_programs(1)
    if STEPS:
        lows, highs = _words(low, high, first_block, 0, blocks, chunks, one, BITS, WARPS, UNROLL, True, False)
        if DEPENDENT:
            # Codes may be loaded while the preceding kernel still runs, since `repack` waits on the host until they are
            # in memory. x may be the preceding kernel's output, so it is loaded after waiting.
            gdc_wait()
        for block in range(first_block, blocks, tl.num_programs(0)):
            sums = tl.zeros([WARPS, 16, 8], tl.float32)
            for step in tl.static_range(STEPS):
                if step + 1 < STEPS:
                    following, _ = _words(
                        low, high, block, (step + 1) * WARPS * UNROLL, blocks, chunks, one,
                        BITS, WARPS, UNROLL, True, False,
                    )  # fmt: skip
                else:
                    following, _ = _words(
                        low, high, block + tl.num_programs(0), 0, blocks, chunks, one, BITS, WARPS, UNROLL, True, True
                    )
                sums = _add_chunks(
                    sums, x, scales, lows, highs, block, step * WARPS * UNROLL, M, K, blocks, x_stride, one,
                    BITS, FLOATS, FIELDS, GROUP, SPAN, WARPS, UNROLL, EVEN,
                )  # fmt: skip
                lows = following
            _store(sums, row_scale, bias, y, block, M, N, row_scale_stride)
    else:
        sums = tl.zeros([WARPS, 16, 8], tl.float32)
        for first in range(0, chunks, WARPS * UNROLL):
            lows, highs = _words(low, high, first_block, first, blocks, chunks, one, BITS, WARPS, UNROLL, EVEN, False)
            if DEPENDENT and BITS != 6:
                # As above; waiting again takes no time.
                gdc_wait()
            sums = _add_chunks(
                sums, x, scales, lows, highs, first_block, first, M, K, blocks, x_stride, one,
                BITS, FLOATS, FIELDS, GROUP, SPAN, WARPS, UNROLL, EVEN,
            )  # fmt: skip
        _store(sums, row_scale, bias, y, first_block, M, N, row_scale_stride)


@triton.jit
def _words(
    low, high, block, first, blocks, chunks, one,
    BITS: tl.constexpr, WARPS: tl.constexpr, UNROLL: tl.constexpr, EVEN: tl.constexpr, MAY_BE_NONE: tl.constexpr,
):  # fmt: skip
    """Load the words of UNROLL chunks per warp from chunk `first` on, and the high bits of 6-bit codes."""
    lows = ()
    highs = ()
    for u in tl.static_range(UNROLL):
        chunk = first + u * WARPS + tl.arange(0, WARPS)
        # Values beyond the last chunk are arbitrary, since x is 0 there.
        live = None if EVEN else (chunk < chunks)[:, None]
        if MAY_BE_NONE:
            live = (block + 0 * chunk < blocks)[:, None]
        at = (block * chunks + chunk)[:, None]
        lows += (tl.load(low + at * 256 + tl.arange(0, 256)[None, :], mask=live),)
        if BITS == 6:
            highs += (load_high(high + at * 128, live, one, WARPS),)
    return lows, highs


@triton.jit
def _add_chunks(
    sums, x, scales, lows, highs, block, first, M, K, blocks, x_stride, one,
    BITS: tl.constexpr, FLOATS: tl.constexpr, FIELDS: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
    WARPS: tl.constexpr, UNROLL: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Add the products of UNROLL chunks per warp to the sums [WARPS, 16, 8], and return them."""
    chunk_width: tl.constexpr = 16 * FIELDS
    # x's elements of a field are [(half o, warp, token), (t, pair)].
    place = tl.arange(0, 2 * WARPS * 8)[:, None]
    pair = tl.arange(0, 8)[None, :]
    k = place // (WARPS * 8) * 8 + place // 8 % WARPS * chunk_width + (pair // 2 * 2 * one + pair % 2)
    token = place % 8
    x_at = x + token * x_stride + k
    # Scales are [warp, (g, t, half h)]; the four threads t of a row read the same scale.
    lane = tl.arange(0, 64)
    lane_row = (lane // 8 * 2 + lane % 2)[None, :]
    for u in tl.static_range(UNROLL):
        chunk = first + u * WARPS + tl.arange(0, WARPS)
        words = lows[u]
        tops = highs[u] if BITS == 6 else words
        start = (first + u * WARPS) * chunk_width
        part = tl.zeros_like(sums)
        for field in tl.static_range(FIELDS):
            a = unpack_field(words, tops, x.dtype.element_ty, field, BITS, FLOATS)
            a = a.reshape(WARPS, 8, 4, 2, 2, 2).permute(0, 4, 1, 3, 2, 5).reshape(WARPS, 16, 16)
            column = start + field * 16
            mask = token < M if EVEN else (token < M) & (column + k < K)
            b = tl.load(x_at + column, mask=mask, other=0.0)
            b = b.reshape(2, WARPS, 8, 8).permute(1, 0, 3, 2).reshape(WARPS, 16, 8)
            if GROUP == 0:
                sums = tl.dot(a, b, sums)
            else:
                part = tl.dot(a, b, part)
                if (field + 1) % SPAN == 0:
                    group = (chunk * chunk_width + field * 16) // GROUP
                    if not EVEN:
                        # Beyond K the scale is arbitrary, since x is 0 there.
                        group = tl.minimum(group, (K - 1) // GROUP)
                    stored = tl.load(scales + (group * blocks + block)[:, None] * 16 + lane_row)
                    scale = decode_scale(stored, GROUP, FLOATS)
                    scale = scale.reshape(WARPS, 8, 4, 2).permute(0, 3, 1, 2)[:, :, :, :, None]
                    scale = scale.broadcast_to(WARPS, 2, 8, 4, 2).reshape(WARPS, 16, 8)
                    sums += part * scale
                    part = tl.zeros_like(sums)
    return sums


@triton.jit
def _store(sums, row_scale, bias, y, block, M, N, row_scale_stride):
    """Add the warps' sums, apply row scales and bias, and store a block's columns of y."""
    n = block * 16 + tl.arange(0, 16)
    m = tl.arange(0, 8)
    total = tl.sum(sums, 0) * tl.load(row_scale + n * row_scale_stride, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if bias is not None:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    tl.store(y + m[None, :] * N + n[:, None], total.to(y.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])
