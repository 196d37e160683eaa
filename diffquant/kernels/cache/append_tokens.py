"""The kernels that append tokens: they pack those that leave the ring of unquantized tokens and write new ones to it.

A program processes one step of tokens of one head. It packs the tokens that leave, then writes new ones to the same
slots of the ring, so no program overwrites slots that another one still reads.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
import triton
import triton.language as tl

from diffquant.kernels.cache.kv_layout import (
    channels_in_word,
    count_packed_tokens,
    field_channels,
    head_pointers,
    word_index,
)
from diffquant.kernels.cache.stored_side import TOKENS_A_STEP

_TOKENS_A_STEP = tl.constexpr(TOKENS_A_STEP)


# Lengths change from call to call, and specializing on their divisibility by 16 would only add compilations.
@triton.jit(do_not_specialize=["tokens", "steps"])
def append_tokens(
    K, k_stride, KCodes, KTop, KScales, KRecent, V, v_stride, VCodes, VTop, VScales, VRecent,
    Progress, tokens, capacity, steps, k_heads, v_heads,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, K_BITS: tl.constexpr, K_BLOCK: tl.constexpr, K_RING: tl.constexpr,
    V_BITS: tl.constexpr, V_RING: tl.constexpr, RESIDUAL: tl.constexpr, K_LIMIT: tl.constexpr, V_LIMIT: tl.constexpr,
    PACKS: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """Append one step of tokens to one head of a store; heads of K come before those of V.

    Tokens that leave the ring are packed if PACKS. If KEEPS, new tokens are written to the ring, and the last program
    to finish advances the length in Progress.
    """
    length = tl.load(Progress)
    k_floor = tl.load(Progress + 1)
    v_floor = tl.load(Progress + 2)
    index = tl.program_id(0) % steps
    row = tl.program_id(0) // steps
    sequence = (row // (k_heads + v_heads)).to(tl.int64)
    head = row % (k_heads + v_heads)
    # A replayed graph may exceed the capacity; tokens that do not fit are dropped.
    total = tl.minimum(length + tokens, capacity)
    if head < k_heads:
        own = sequence * k_heads + head
        codes, top, scales = head_pointers(KCodes, KTop, KScales, own, capacity, K_BITS, K_BLOCK, WIDTH)
        append_step(
            K + sequence * k_stride[0] + head * k_stride[1], k_stride[2], k_stride[3],
            codes, top, scales, KRecent + own * K_RING * WIDTH, index, length, total, tokens, k_floor,
            K_BITS, K_BLOCK, K_RING, RESIDUAL, WIDTH, K_LIMIT, False, PACKS, KEEPS,
        )  # fmt: skip
    else:
        head -= k_heads
        own = sequence * v_heads + head
        # Different names than in the other branch, since Triton gives a name one type in both.
        v_codes, v_top, v_scales = head_pointers(VCodes, VTop, VScales, own, capacity, V_BITS, 1, VALUE_WIDTH)
        append_step(
            V + sequence * v_stride[0] + head * v_stride[1], v_stride[2], v_stride[3],
            v_codes, v_top, v_scales, VRecent + own * V_RING * VALUE_WIDTH, index, length, total, tokens,
            v_floor, V_BITS, 1, V_RING, RESIDUAL, VALUE_WIDTH, V_LIMIT, True, PACKS, KEEPS,
        )  # fmt: skip
    if KEEPS:
        # The last program to finish advances the length, since all others have read the old one by then.
        tl.debug_barrier()
        arrived = tl.atomic_add(Progress + 3, 1)
        if arrived == tl.num_programs(0) - 1:
            tl.store(Progress, total)
            tl.store(Progress + 3, 0)


@triton.jit
def append_step(
    New, token_stride, channel_stride, Codes, Top, Scales, Recent, index, length, total, tokens, floor,
    BITS: tl.constexpr, BLOCK: tl.constexpr, RING: tl.constexpr, RESIDUAL: tl.constexpr, WIDTH: tl.constexpr,
    LIMIT: tl.constexpr, TRANSPOSED: tl.constexpr, PACKS: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """Pack the tokens of step `index` that leave one head's ring, if PACKS, and write new tokens to it, if KEEPS."""
    STEP: tl.constexpr = BLOCK if BLOCK > 1 else _TOKENS_A_STEP
    packed = count_packed_tokens(length, floor, BITS, BLOCK, RESIDUAL)
    packing = count_packed_tokens(total, floor, BITS, BLOCK, RESIDUAL)
    kept = tl.maximum(length, packing)
    leaving = tl.cdiv(tokens + BLOCK - 1, STEP) + 1
    leaves = index < leaving
    step = tl.where(leaves, packed // STEP + index, kept // STEP - RING // STEP + index - leaving)
    begin = step * STEP
    packs = (begin + STEP > packed) & (begin < packing)
    if PACKS and leaves & packs:
        _pack_step(
            New, token_stride, channel_stride, Codes, Top, Scales, Recent, begin, packed, packing, length,
            BITS, BLOCK, RING, WIDTH, LIMIT, TRANSPOSED, STEP,
        )  # fmt: skip
    if KEEPS and RING:
        # Slots of a packed step are free only now; only the program that packed it writes to them.
        tl.debug_barrier()
        owned = (leaves == packs) if PACKS else index >= leaving
        if owned:
            token = begin + RING + tl.arange(0, STEP)
            column = tl.arange(0, WIDTH)[None, :]
            new = ((token >= kept) & (token < total))[:, None]
            source = New + (token - length).to(tl.int64)[:, None] * token_stride + column * channel_stride
            slot = Recent + word_index((token % RING)[:, None], column, WIDTH, 1, TRANSPOSED)
            tl.store(slot, tl.load(source, mask=new), mask=new)


@triton.jit
def _pack_step(
    New, token_stride, channel_stride, Codes, Top, Scales, Recent, begin, packed, packing, length,
    BITS: tl.constexpr, BLOCK: tl.constexpr, RING: tl.constexpr, WIDTH: tl.constexpr, LIMIT: tl.constexpr,
    TRANSPOSED: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Quantize and store the tokens of [begin, begin + STEP) that are in [packed, packing), for one head."""
    FIELDS: tl.constexpr = channels_in_word(BITS)
    PLANE: tl.constexpr = 8 if BITS == 8 else 4
    token = begin + tl.arange(0, STEP)
    first = field_channels(0, WIDTH, FIELDS)[None, :]
    inside = ((token >= packed) & (token < packing))[:, None]
    is_new = inside & (token >= length)[:, None]
    is_old = inside & (token < length)[:, None]
    new = New + (token - length).to(tl.int64)[:, None] * token_stride
    slot = (token % RING if RING else token)[:, None]
    at = word_index(token[:, None], first, WIDTH, FIELDS, TRANSPOSED)
    if BITS == 16:
        tl.store(Codes + at, tl.load(new + first * channel_stride, mask=is_new), mask=inside)
    else:
        of_tokens = tl.full([STEP], 1.0, tl.float32)
        if BLOCK == 1:
            largest = tl.zeros([STEP], tl.float32)
            for field in tl.static_range(FIELDS):
                x = _states(
                    new, channel_stride, is_new, Recent, slot, is_old, first + field * 16, WIDTH, RING, TRANSPOSED
                )
                largest = tl.maximum(largest, tl.max(tl.abs(x), 1))
            of_tokens = _scale(largest, BITS, LIMIT, New.dtype.element_ty)
            tl.store(Scales + token, of_tokens, mask=(token >= packed) & (token < packing))
        words = tl.zeros([STEP, WIDTH // FIELDS], tl.int32)
        tops = words
        for field in tl.static_range(FIELDS):
            channel = first + field * 16
            x = _states(new, channel_stride, is_new, Recent, slot, is_old, channel, WIDTH, RING, TRANSPOSED)
            of_channels = Scales + begin // BLOCK * WIDTH + channel
            code = _quantize(x, of_tokens, of_channels, BITS, BLOCK, LIMIT, New.dtype.element_ty)
            words |= (code & ((1 << PLANE) - 1)) << (PLANE * field)
            tops |= (code >> 4) << (2 * field)
        tl.store(Codes + at, words.to(tl.int16), mask=inside)
        if BITS == 6:
            tl.store(Top.to(tl.pointer_type(tl.uint8)) + at, tops.to(tl.uint8), mask=inside)


@triton.jit
def _states(
    new, channel_stride, is_new, Recent, slot, is_old, channel,
    WIDTH: tl.constexpr, RING: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Load keys or values of tokens in float32: new ones from the input, earlier ones from the ring."""
    x = tl.load(new + channel * channel_stride, mask=is_new, other=0.0).to(tl.float32)
    if RING:
        at = Recent + word_index(slot, channel, WIDTH, 1, TRANSPOSED)
        x += tl.load(at, mask=is_old, other=0.0).to(tl.float32)
    return x


@triton.jit
def _scale(largest, BITS: tl.constexpr, LIMIT: tl.constexpr, DTYPE: tl.constexpr):
    """Compute the scale for a largest magnitude, as `numbers.absmax` does."""
    LARGEST: tl.constexpr = 2 ** (BITS - 1) - 1
    quotient = tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))
    scale = quotient.to(DTYPE).to(tl.float32)
    # In float16, subnormal scales are rounded up, as in `numbers`. Subnormal bfloat16 scales do not occur, since they
    # are subnormal in float32 too, where the GPU flushes them to 0.
    if tl.float16 == DTYPE:
        scale += tl.where((scale < quotient) & (scale < 2.0**-14), 2.0**-24, 0.0)
    return tl.where(scale == 0.0, 1.0, tl.minimum(scale, LIMIT))


@triton.jit
def _quantize(
    states, of_tokens, Scales, BITS: tl.constexpr, BLOCK: tl.constexpr, LIMIT: tl.constexpr, DTYPE: tl.constexpr
):
    """Compute unsigned codes, as the integer formats' `encode` does; also store per-channel scales."""
    LARGEST: tl.constexpr = 2 ** (BITS - 1) - 1
    if BLOCK > 1:
        scale = _scale(tl.max(tl.abs(states), 0), BITS, LIMIT, DTYPE)[None, :]
        tl.store(Scales, scale)
    else:
        scale = of_tokens[:, None]
    ratio = tl.div_rn(states, tl.broadcast_to(scale, states.shape))
    # Adding 1.5·2^23 rounds to an integer, half to even, for which there is no portable instruction.
    code = (ratio + 12582912.0) - 12582912.0
    code = tl.minimum(tl.maximum(code, -LARGEST), LARGEST)
    return (code + (LARGEST + 1)).to(tl.int32)
