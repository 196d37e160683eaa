"""The layout of a `KVStore` as kernels read it: where a head lies, how many tokens are packed, codes out of bytes.

Codes become half floats without a conversion: 0x6400 | n is the float16 number 1024 + n. On a GPU this is
spelled in PTX, four codes at a time, since the compiler would widen each byte alone; the interpreter knows
no PTX.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import triton
import triton.language as tl


def _widening(extract: str, zero: int) -> tl.constexpr:
    """PTX that turns four stored bytes, extracted to `t`, into four float16 codes."""
    return tl.constexpr(
        f"{{ .reg .b32 t, u, c; {extract} mov.b32 c, {0x64006400 + zero * 0x10001:#x};"
        "prmt.b32 $0, t, 0x64646464, 0x4140; prmt.b32 $1, t, 0x64646464, 0x4342;"
        "sub.f16x2 $0, $0, c; sub.f16x2 $1, $1, c; }"
    )


_BYTES = _widening("mov.b32 t, $2;", 128)
_LOW_NIBBLES = _widening("and.b32 t, $2, 0x0f0f0f0f;", 8)
_HIGH_NIBBLES = _widening("shr.b32 t, $2, 4; and.b32 t, t, 0x0f0f0f0f;", 8)
_SIX_0 = _widening("shl.b32 u, $3, 4; and.b32 u, u, 0x30303030; and.b32 t, $2, 0x0f0f0f0f; or.b32 t, t, u;", 32)
_SIX_1 = _widening("shl.b32 u, $3, 2; and.b32 u, u, 0x30303030; and.b32 t, $2, 0x0f0f0f0f; or.b32 t, t, u;", 32)
_SIX_2 = _widening("and.b32 u, $3, 0x30303030; shr.b32 t, $2, 4; and.b32 t, t, 0x0f0f0f0f; or.b32 t, t, u;", 32)
_SIX_3 = _widening(
    "shr.b32 u, $3, 2; and.b32 u, u, 0x30303030; shr.b32 t, $2, 4; and.b32 t, t, 0x0f0f0f0f; or.b32 t, t, u;", 32
)


@triton.jit
def _floats(stored, ZERO: tl.constexpr, DTYPE: tl.constexpr):
    if tl.float16 == DTYPE:
        out = (stored.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + ZERO)
    else:
        out = stored.to(tl.float32) - ZERO
    return out


@triton.jit
def _from_bytes(x, DTYPE: tl.constexpr, PTX: tl.constexpr):
    if PTX:
        out = tl.inline_asm_elementwise(_BYTES, "=&r,=&r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
    else:
        out = _floats(x, 128, DTYPE)
    return out


@triton.jit
def _from_nibbles(x, DTYPE: tl.constexpr, PTX: tl.constexpr):
    if PTX:
        low = tl.inline_asm_elementwise(_LOW_NIBBLES, "=&r,=&r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
        high = tl.inline_asm_elementwise(_HIGH_NIBBLES, "=&r,=&r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
        out = low, high
    else:
        out = _floats(x & 15, 8, DTYPE), _floats(x >> 4, 8, DTYPE)
    return out


@triton.jit
def _from_six(first, second, top, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Codes of a head's four quarters, from nibbles of quarters 0 and 2, of 1 and 3, and the top two bits of all."""
    if PTX:
        a = tl.inline_asm_elementwise(_SIX_0, "=&r,=&r,r,r", [first, top], dtype=tl.float16, is_pure=True, pack=4)
        b = tl.inline_asm_elementwise(_SIX_1, "=&r,=&r,r,r", [second, top], dtype=tl.float16, is_pure=True, pack=4)
        c = tl.inline_asm_elementwise(_SIX_2, "=&r,=&r,r,r", [first, top], dtype=tl.float16, is_pure=True, pack=4)
        d = tl.inline_asm_elementwise(_SIX_3, "=&r,=&r,r,r", [second, top], dtype=tl.float16, is_pure=True, pack=4)
        out = a, b, c, d
    else:
        out = (
            _floats((first & 15) | ((top & 3) << 4), 32, DTYPE),
            _floats((second & 15) | ((top & 12) << 2), 32, DTYPE),
            _floats((first >> 4) | (top & 48), 32, DTYPE),
            _floats((second >> 4) | ((top >> 6) << 4), 32, DTYPE),
        )
    return out


@triton.jit
def parts(
    Codes, Top, token,
    BITS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Codes of tokens [N] of one head as PARTS tiles [N, WIDTH / PARTS], not yet multiplied by their scales."""
    PART: tl.constexpr = WIDTH // PARTS
    column = tl.arange(0, PART)[None, :]
    if BITS == 4:
        out = _from_nibbles(tl.load(Codes + token[:, None] * PART + column), DTYPE, PTX)
    elif BITS == 6:
        row = Codes + token[:, None] * (WIDTH // 2) + column
        top = tl.load(Top + token[:, None] * PART + column)
        out = _from_six(tl.load(row), tl.load(row + PART), top, DTYPE, PTX)
    elif BITS == 8:
        out = (_from_bytes(tl.load(Codes + token[:, None] * WIDTH + column), DTYPE, PTX),)
    else:
        row = Codes + token[:, None] * WIDTH + column
        if PARTS == 1:
            out = (tl.load(row),)
        elif PARTS == 2:
            out = tl.load(row), tl.load(row + PART)
        else:
            out = tl.load(row), tl.load(row + PART), tl.load(row + 2 * PART), tl.load(row + 3 * PART)
    return out


@triton.jit
def whole(Codes, Top, token, BITS: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Codes of tokens [N] of one head as one tile [N, WIDTH]: `parts` side by side."""
    x = parts(Codes, Top, token, BITS, WIDTH, parts_of(BITS), DTYPE, PTX)
    if BITS == 4:
        out = tl.reshape(tl.permute(tl.join(x[0], x[1]), (0, 2, 1)), (token.shape[0], WIDTH))
    elif BITS == 6:
        quarters = tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3]))
        out = tl.reshape(tl.permute(quarters, (0, 2, 3, 1)), (token.shape[0], WIDTH))
    else:
        out = x[0]
    return out


@triton.jit
def packed_tokens(length, floor, BITS: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr):
    """Number of packed tokens, as `StoredSide.packed` counts them."""
    return length if BITS == 16 else tl.maximum(floor, (length - RESIDUAL) // BLOCK * BLOCK)


@triton.jit
def stored_head(Codes, Top, Scales, head, capacity, BITS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Pointers to a head's codes, second plane and scales; heads stand one after another, `capacity` tokens each."""
    scales = capacity // BLOCK * WIDTH if BLOCK > 1 else capacity
    stored: tl.constexpr = WIDTH // 2 if BITS < 8 else WIDTH
    return Codes + head * capacity * stored, Top + head * capacity * (WIDTH // 4), Scales + head * scales


@triton.constexpr_function
def parts_of(BITS):
    """Number of tiles that a head unpacks into, side by side."""
    return {4: 2, 6: 4}.get(BITS, 1)
