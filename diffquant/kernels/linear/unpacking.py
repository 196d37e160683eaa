"""Unpacks words from `repack` to fragments of half-precision weights, two values per instruction.

Bits of a code in the low mantissa bits of 1024 (float16) or 128 (bfloat16) represent that number plus the code, so a
mask and a fused multiply-add unpack two codes. bfloat16 has 7 mantissa bits, so the highest of 8 bits is applied in a
separate addend. Triton would unpack values one by one, so this is inline PTX. The interpreter cannot run PTX and
uses ordinary operations.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"
import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.constexpr_function
def make_unpack_ptx(bits, field, half):
    """Return PTX that unpacks a field of two words $1 to two codes $0, float16 if `half`, else bfloat16.

    For 6 bits, $2 are two bytes with the codes' high 2 bits.
    """
    width = 8 if bits == 8 else 4
    middle = 1 << (bits - 1)
    # float16 has enough mantissa bits to leave every other field shifted by 4 bits; the multiply-add divides by 16.
    place = 4 if half and width == 4 and field % 2 else 0
    if half:
        # The addend is -(1024 + middle), or with 1024 / 16 for shifted fields; the factor is 1, or 1/16.
        base, addend, factor = (
            0x6400,
            (0xD400 | middle << 4) if place else (0xE400 | middle),
            0x2C00 if place else 0x3C00,
        )
    else:
        base, addend, factor = 0x4300, 0xC300 | middle, 0x3F80
    mask = ((1 << width) - 1) << place
    lines = [".reg .b32 t, h, c;", make_shift_ptx("t", "$1", place - width * field)]
    if bits == 8 and not half:
        # The addend is -128 if the code's highest bit is set, else -256.
        lines += ["and.b32 c, t, 0x00800080;", "xor.b32 c, c, 0xC380C380;"]
        mask = 0x7F
    else:
        lines += [f"mov.b32 c, {repeat_half_word(addend)};"]
    # The lookup table 0xEA computes (a & b) | c.
    lines += [f"lop3.b32 t, t, {repeat_half_word(mask)}, {repeat_half_word(base)}, 0xEA;"]
    if bits == 6:
        lines += [
            make_shift_ptx("h", "$2", 4 + place - 2 * field),
            f"lop3.b32 t, h, {repeat_half_word(3 << (4 + place))}, t, 0xEA;",
        ]
    lines += [f"mov.b32 h, {repeat_half_word(factor)};", f"fma.rn.{'f' if half else 'bf'}16x2 $0, t, h, c;"]
    return "{" + " ".join(lines) + "}"


@triton.constexpr_function
def make_float_unpack_ptx(field, half):
    """Return PTX that unpacks a field of two words $1, E2M1 floats, to $0, float16 if `half`, else bfloat16.

    Their exponent and mantissa bits are moved to those of float16 or bfloat16, and a product corrects the exponent
    bias, which is also right for subnormal numbers.
    """
    # Position of the lowest mantissa bit, and the power of two that corrects the exponent bias.
    place, bias = (9, 0x7400) if half else (6, 0x7E80)
    lines = [
        ".reg .b32 t, h, c;",
        make_shift_ptx("h", "$1", place - 4 * field),
        f"and.b32 h, h, {repeat_half_word(7 << place)};",
    ]
    lines += [
        make_shift_ptx("t", "$1", 12 - 4 * field),
        f"lop3.b32 t, t, 0x80008000, h, 0xEA; mov.b32 h, {repeat_half_word(bias)};",
    ]
    lines += [f"mov.b32 c, 0x80008000; fma.rn.{'f' if half else 'bf'}16x2 $0, t, h, c;"]
    return "{" + " ".join(lines) + "}"


@triton.constexpr_function
def make_product_ptx(half):
    """Return PTX for two products $0 = $1 · $2 of float16 if `half`, else bfloat16.

    It is an fma with -0, since Ampere has no bf16x2 product.
    """
    return f"{{.reg .b32 c; mov.b32 c, {repeat_half_word(0x8000)}; fma.rn.{'f' if half else 'bf'}16x2 $0, $1, $2, c;}}"


@triton.constexpr_function
def make_shift_ptx(target, source, left):
    """Return PTX that shifts a register left, or right where `left` is negative."""
    if left == 0:
        return f"mov.b32 {target}, {source};"
    return f"{'shl' if left > 0 else 'shr'}.b32 {target}, {source}, {abs(left)};"


@triton.constexpr_function
def repeat_half_word(half_word):
    """Return a PTX literal of 32 bits with these 16 bits in both halves."""
    return f"0x{half_word:04X}{half_word:04X}"


@triton.jit
def load_high(high, mask, one, COUNT: tl.constexpr):
    """Load the bytes with the high 2 bits of 6-bit codes, [COUNT, 256].

    `high` [COUNT, 1] are pointers to the first byte of each row, and `mask` selects rows. `one` is 1, passed at run
    time to prevent the compiler from merging loads.

    Bytes are loaded in pairs. If they were loaded individually, Triton would choose the register layout of 8-bit
    matrices, which orders columns differently.
    """
    two = tl.arange(0, 128)
    # Since the compiler does not know that `one` is 1, a thread loads only the 4 bytes that its words need.
    twos = tl.load(high + (two // 4 * 4 * one + two % 4)[None, :], mask=mask)
    twos = twos[:, :, None].broadcast_to(COUNT, 128, 2).reshape(COUNT, 256).to(tl.uint16, bitcast=True)
    odd = (tl.arange(0, 256) % 2)[None, :].to(tl.uint16)
    return (twos >> (odd * 8)) & 0xFF


@triton.jit
def unpack_field(low, high, dtype: tl.constexpr, FIELD: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr = False):
    """Return one field of words `low` in `dtype`: codes, or E2M1 numbers if FLOATS.

    For 6 bits, `high` are bytes with the codes' high 2 bits.
    """
    if INTERPRETED and FLOATS:
        stored = (low.to(tl.int32) >> (4 * FIELD)) & 15
        magnitude = stored & 7
        # 0 and 0.5 are subnormal.
        value = tl.where(magnitude < 2, magnitude * 0.5, (2 + (magnitude & 1)) * (1 << (magnitude >> 1)) * 0.25)
        codes = tl.where(stored < 8, value, -value).to(dtype)
    elif INTERPRETED:
        wide = low.to(tl.int32)
        stored = (wide >> (8 * FIELD)) & 255 if BITS == 8 else (wide >> (4 * FIELD)) & 15
        if BITS == 6:
            stored |= ((high.to(tl.int32) >> (2 * FIELD)) & 3) << 4
        codes = (stored - (1 << (BITS - 1))).to(dtype)
    else:
        half: tl.constexpr = dtype == tl.float16
        program: tl.constexpr = make_float_unpack_ptx(FIELD, half) if FLOATS else make_unpack_ptx(BITS, FIELD, half)
        # The number of operands must match the PTX.
        operands = [low, high] if BITS == 6 else [low]
        constraints: tl.constexpr = "=r,r,r" if BITS == 6 else "=r,r"
        if dtype == tl.float16:
            codes = tl.inline_asm_elementwise(program, constraints, operands, tl.float16, is_pure=True, pack=2)
        else:
            codes = tl.inline_asm_elementwise(program, constraints, operands, tl.bfloat16, is_pure=True, pack=2)
    return codes


@triton.jit
def decode_scale(stored, GROUP: tl.constexpr, FLOATS: tl.constexpr):
    """Convert a stored group scale to float32. If FLOATS it is a byte: e4m3 for groups of 16, else E8M0."""
    if not FLOATS:
        scale = stored.to(tl.float32)
    else:
        bits = stored.to(tl.int32)
        if GROUP == 16:
            # Bits are moved to those of float32, and a product corrects the exponent bias, also of subnormal numbers.
            scale = ((bits & 127) << 20 | (bits & 128) << 24).to(tl.float32, bitcast=True) * 1.329227995784916e36
        else:
            # Exponent 0 means half the smallest normal float32.
            scale = tl.where(bits == 0, 1 << 22, bits << 23).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def multiply(a, b):
    """Compute the elementwise product of half-precision tensors, two values per instruction."""
    program: tl.constexpr = make_product_ptx(a.dtype == tl.float16)
    if INTERPRETED:
        product = a * b
    elif a.dtype == tl.float16:
        product = tl.inline_asm_elementwise(program, "=r,r,r", [a, b], tl.float16, is_pure=True, pack=2)
    else:
        product = tl.inline_asm_elementwise(program, "=r,r,r", [a, b], tl.bfloat16, is_pure=True, pack=2)
    return product


@triton.jit
def load_chunk(
    low, high, scales, block, blocks, chunk, chunks, K,
    dtype: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr, FIELDS: tl.constexpr, GROUP: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """Load and unpack one chunk of the row blocks with indices `block`; apply group scales, but not `row_scale`.

    Blocks, chunks and arguments are those of `PackedWeight`.

    Returns:
        A tuple with a tensor [row blocks, 256] per field.
    """
    count: tl.constexpr = block.shape[0]
    live = (block < blocks)[:, None]
    # Terms that do not depend on the chunk come first, so that they are computed once.
    words = tl.load(low + (block[:, None] * chunks * 256 + tl.arange(0, 256)[None, :]) + chunk * 256, mask=live)
    tops = words
    if BITS == 6:
        tops = load_high(high + block[:, None] * chunks * 128 + chunk * 128, live, 1, count)
    k = chunk * (16 * FIELDS)
    codes = ()
    for field in tl.static_range(FIELDS):
        codes += (unpack_field(words, tops, dtype, field, BITS, FLOATS),)
    weights = codes
    if GROUP:
        weights = ()
        for field in tl.static_range(FIELDS):
            # A group spans SPAN fields of a chunk.
            if field % SPAN == 0:
                scale = _group_scales(scales, block, blocks, k + field * 16, K, dtype, GROUP, FLOATS)
            weights += (multiply(codes[field], scale),)
    return weights


@triton.jit
def join_fields(fields, FIELDS: tl.constexpr):
    """Join a chunk's fields, each [count, 256] with a 16 x 16 fragment per row, to a matrix [16 count, 16 FIELDS]."""
    count: tl.constexpr = fields[0].shape[0]
    if FIELDS == 2:
        a = tl.join(fields[0], fields[1]).reshape(count, 8, 4, 2, 2, 2, 2).permute(0, 4, 1, 6, 3, 2, 5)
    else:
        a = tl.join(tl.join(fields[0], fields[1]), tl.join(fields[2], fields[3])).reshape(count, 8, 4, 2, 2, 2, 2, 2)
        a = a.permute(0, 4, 1, 7, 6, 3, 2, 5)
    return a.reshape(count * 16, 16 * FIELDS)


@triton.jit
def _group_scales(
    scales, block, blocks, k, K, dtype: tl.constexpr, GROUP: tl.constexpr, FLOATS: tl.constexpr
):  # fmt: skip
    """Load the scales of column k's group, or beyond K of the last group, repeated for the words of the row blocks."""
    count: tl.constexpr = block.shape[0]
    # Ordered (g, t, half h); the four threads t of a row read the same scale.
    lane = tl.arange(0, 64)
    at = scales + (block[:, None] * 16 + (lane // 8 * 2 + lane % 2)[None, :])
    scale = tl.load(at + tl.minimum(k, K - 1) // GROUP * blocks * 16, mask=(block < blocks)[:, None])
    scale = decode_scale(scale, GROUP, FLOATS).to(dtype) if FLOATS else scale
    return scale.reshape(count, 32, 1, 2, 1).broadcast_to(count, 32, 2, 2, 2).reshape(count, 256)
