"""Unpacking of `repack`'s words to fragments of half-precision weights, two values an instruction.

A few bits below the exponent of 1024 (float16) or 128 (bfloat16) are that number plus their value, so a mask and
one fused multiply-add give two codes. bfloat16 has 7 bits of mantissa: the top one of 8 goes into an addend of
its own. Triton would unpack value by value, hence the assembly; the interpreter, which does not run it, takes
plain operations.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.constexpr_function
def unpack_program(bits, field, half):
    """PTX that unpacks two codes of a field into $0, from two words $1 and, for 6 bits, their high bytes $2."""
    width = 8 if bits == 8 else 4
    middle = 1 << (bits - 1)
    # float16 has room to leave every other field 4 bits up and divide by 16 in the multiply-add.
    place = 4 if half and width == 4 and field % 2 else 0
    if half:
        # -(1024 + middle), or a 16th of 1024; the factor 1, or a 16th.
        base, addend, factor = (
            0x6400,
            (0xD400 | middle << 4) if place else (0xE400 | middle),
            0x2C00 if place else 0x3C00,
        )
    else:
        base, addend, factor = 0x4300, 0xC300 | middle, 0x3F80
    mask = ((1 << width) - 1) << place
    lines = [".reg .b32 t, h, c;", shifted("t", "$1", place - width * field)]
    if bits == 8 and not half:
        # -128 where the value's top bit is set, else -256.
        lines += ["and.b32 c, t, 0x00800080;", "xor.b32 c, c, 0xC380C380;"]
        mask = 0x7F
    else:
        lines += [f"mov.b32 c, {twice(addend)};"]
    # 0xEA is (a & b) | c.
    lines += [f"lop3.b32 t, t, {twice(mask)}, {twice(base)}, 0xEA;"]
    if bits == 6:
        lines += [shifted("h", "$2", 4 + place - 2 * field), f"lop3.b32 t, h, {twice(3 << (4 + place))}, t, 0xEA;"]
    lines += [f"mov.b32 h, {twice(factor)};", f"fma.rn.{'f' if half else 'bf'}16x2 $0, t, h, c;"]
    return "{" + " ".join(lines) + "}"


@triton.constexpr_function
def float_program(field, half):
    """PTX that unpacks two E2M1 floats of a field into $0, from two words $1.

    Their exponent and mantissa are those of the half type but for its bias, subnormal numbers included.
    """
    # Where the lowest bit of the mantissa goes, and the power of two between both biases.
    place, bias = (9, 0x7400) if half else (6, 0x7E80)
    lines = [".reg .b32 t, h, c;", shifted("h", "$1", place - 4 * field), f"and.b32 h, h, {twice(7 << place)};"]
    lines += [shifted("t", "$1", 12 - 4 * field), f"lop3.b32 t, t, 0x80008000, h, 0xEA; mov.b32 h, {twice(bias)};"]
    lines += [f"mov.b32 c, 0x80008000; fma.rn.{'f' if half else 'bf'}16x2 $0, t, h, c;"]
    return "{" + " ".join(lines) + "}"


@triton.constexpr_function
def product_program(half):
    """PTX for two products $0 of $1 and $2; Ampere has no bf16x2 product, but a fused multiply-add, here of -0."""
    return f"{{.reg .b32 c; mov.b32 c, {twice(0x8000)}; fma.rn.{'f' if half else 'bf'}16x2 $0, $1, $2, c;}}"


@triton.constexpr_function
def shifted(target, source, left):
    """PTX that shifts a register left, or right where `left` is negative."""
    if left == 0:
        return f"mov.b32 {target}, {source};"
    return f"{'shl' if left > 0 else 'shr'}.b32 {target}, {source}, {abs(left)};"


@triton.constexpr_function
def twice(half_word):
    """PTX literal of 16 bits in both halves of a word."""
    return f"0x{half_word:04X}{half_word:04X}"


@triton.jit
def load_high(high, mask, one, COUNT: tl.constexpr):
    """High bytes [COUNT, 256] of words, from `high` [COUNT, 1] where each 256 begin.

    Bytes are loaded in twos: Triton would take a matrix made of single bytes for one of 8-bit values and choose
    another order of its columns in registers.
    """
    two = tl.arange(0, 128)
    # Where the compiler does not know `one`, a thread loads those 4 that its own words need.
    twos = tl.load(high + (two // 4 * 4 * one + two % 4)[None, :], mask=mask)
    twos = twos[:, :, None].broadcast_to(COUNT, 128, 2).reshape(COUNT, 256).to(tl.uint16, bitcast=True)
    odd = (tl.arange(0, 256) % 2)[None, :].to(tl.uint16)
    return (twos >> (odd * 8)) & 0xFF


@triton.jit
def unpack_field(low, high, dtype: tl.constexpr, FIELD: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr = False):
    """Codes of a field of the words `low` (and bytes `high`, for 6 bits); the numbers of E2M1 codes if FLOATS."""
    if INTERPRETED and FLOATS:
        stored = (low.to(tl.int32) >> (4 * FIELD)) & 15
        magnitude = stored & 7
        # 0 and a half are subnormal.
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
        program: tl.constexpr = float_program(FIELD, half) if FLOATS else unpack_program(BITS, FIELD, half)
        # Operands are as many as the program has.
        operands = [low, high] if BITS == 6 else [low]
        constraints: tl.constexpr = "=r,r,r" if BITS == 6 else "=r,r"
        if dtype == tl.float16:
            codes = tl.inline_asm_elementwise(program, constraints, operands, tl.float16, is_pure=True, pack=2)
        else:
            codes = tl.inline_asm_elementwise(program, constraints, operands, tl.bfloat16, is_pure=True, pack=2)
    return codes


@triton.jit
def read_scale(stored, GROUP: tl.constexpr, FLOATS: tl.constexpr):
    """float32 of a group's scale: of a number, or of a byte if FLOATS, e4m3 for groups of 16 and else E8M0."""
    if not FLOATS:
        scale = stored.to(tl.float32)
    else:
        bits = stored.to(tl.int32)
        if GROUP == 16:
            # Exponent and mantissa are float32's but for its bias, subnormal numbers included.
            scale = ((bits & 127) << 20 | (bits & 128) << 24).to(tl.float32, bitcast=True) * 1.329227995784916e36
        else:
            # The exponent 0 is that of half the smallest normal number.
            scale = tl.where(bits == 0, 1 << 22, bits << 23).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def multiply(a, b):
    """Elementwise product of half-precision tensors, two values an instruction."""
    program: tl.constexpr = product_program(a.dtype == tl.float16)
    if INTERPRETED:
        product = a * b
    elif a.dtype == tl.float16:
        product = tl.inline_asm_elementwise(program, "=r,r,r", [a, b], tl.float16, is_pure=True, pack=2)
    else:
        product = tl.inline_asm_elementwise(program, "=r,r,r", [a, b], tl.bfloat16, is_pure=True, pack=2)
    return product


@triton.jit
def chunk_weights(
    low, high, scales, block, blocks, chunk, chunks, K,
    dtype: tl.constexpr, BITS: tl.constexpr, FLOATS: tl.constexpr, FIELDS: tl.constexpr, GROUP: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """Weights of a chunk of some row blocks, in units of `row_scale`: a fragment [count, 256] for each field.

    Where words have 2 fields, the last two results mean nothing.
    """
    count: tl.constexpr = block.shape[0]
    live = (block < blocks)[:, None]
    # What does not depend on the chunk comes first, to be computed once.
    words = tl.load(low + (block[:, None] * chunks * 256 + tl.arange(0, 256)[None, :]) + chunk * 256, mask=live)
    tops = words
    if BITS == 6:
        tops = load_high(high + block[:, None] * chunks * 128 + chunk * 128, live, 1, count)
    k = chunk * (16 * FIELDS)
    a0 = unpack_field(words, tops, dtype, 0, BITS, FLOATS)
    a1 = unpack_field(words, tops, dtype, 1, BITS, FLOATS)
    a2 = a0
    a3 = a1
    if FIELDS == 4:
        a2 = unpack_field(words, tops, dtype, 2, BITS, FLOATS)
        a3 = unpack_field(words, tops, dtype, 3, BITS, FLOATS)
    if GROUP:
        # A group spans SPAN fields of a chunk.
        scale = _group_scales(scales, block, blocks, k, K, dtype, GROUP, FLOATS)
        a0 = multiply(a0, scale)
        if SPAN == 1:
            scale = _group_scales(scales, block, blocks, k + 16, K, dtype, GROUP, FLOATS)
        a1 = multiply(a1, scale)
        if FIELDS == 4:
            if SPAN < 4:
                scale = _group_scales(scales, block, blocks, k + 32, K, dtype, GROUP, FLOATS)
            a2 = multiply(a2, scale)
            if SPAN == 1:
                scale = _group_scales(scales, block, blocks, k + 48, K, dtype, GROUP, FLOATS)
            a3 = multiply(a3, scale)
    return a0, a1, a2, a3


@triton.jit
def join_fields(a0, a1, a2, a3, FIELDS: tl.constexpr):
    """Matrix [16 count, 16 FIELDS] of a chunk, from its fields [count, 256]."""
    count: tl.constexpr = a0.shape[0]
    if FIELDS == 2:
        a = tl.join(a0, a1).reshape(count, 8, 4, 2, 2, 2, 2).permute(0, 4, 1, 6, 3, 2, 5)
    else:
        a = tl.join(tl.join(a0, a1), tl.join(a2, a3)).reshape(count, 8, 4, 2, 2, 2, 2, 2)
        a = a.permute(0, 4, 1, 7, 6, 3, 2, 5)
    return a.reshape(count * 16, 16 * FIELDS)


@triton.jit
def _group_scales(
    scales, block, blocks, k, K, dtype: tl.constexpr, GROUP: tl.constexpr, FLOATS: tl.constexpr
):  # fmt: skip
    """Scales of column k's group (beyond K, of the last one), spread over the words of the row blocks."""
    count: tl.constexpr = block.shape[0]
    # The four threads t of a row read the same: (g, t, half h).
    lane = tl.arange(0, 64)
    at = scales + (block[:, None] * 16 + (lane // 8 * 2 + lane % 2)[None, :])
    scale = tl.load(at + tl.minimum(k, K - 1) // GROUP * blocks * 16, mask=(block < blocks)[:, None])
    scale = read_scale(scale, GROUP, FLOATS).to(dtype) if FLOATS else scale
    return scale.reshape(count, 32, 1, 2, 1).broadcast_to(count, 32, 2, 2, 2).reshape(count, 256)
