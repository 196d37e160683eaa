"""From words of `repack` to fragments of half-precision codes, two values an instruction.

A 4-bit value below the exponent of 1024 (float16) or 128 (bfloat16) is that number plus the value, so a mask
and one fused multiply-add give a pair of codes. bfloat16 has 7 bits of mantissa: the top one of 8 goes into an
addend of its own. Triton would unpack value by value, hence the assembly, which the interpreter does not
run: without it the same comes out of plain operations.
"""

import os
from functools import cache

import torch
import triton
import triton.language as tl

from diffquant.kernels.repack import fields


def assembly(bits: int, dtype: torch.dtype) -> tuple[tuple[str, ...], str]:
    """A program for each field of a word, and one for products; empty for the interpreter."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return ("",) * fields(bits), ""
    return _assembly(bits, dtype)


@cache
def _assembly(bits: int, dtype: torch.dtype) -> tuple[tuple[str, ...], str]:
    return tuple(_field(bits, field, dtype) for field in range(fields(bits))), _product(dtype)


def _field(bits: int, field: int, dtype: torch.dtype) -> str:
    """Codes of one field: operands are outputs $0, $1, words $2, $3 and, for 6 bits, the four bytes $4."""
    half = dtype == torch.float16
    width = 8 if bits == 8 else 4
    # float16 has room to leave every other field 4 bits up and divide by 16 in the multiply-add.
    place = 4 if half and width == 4 and field % 2 else 0
    # Stored values are code + 2^(bits-1); what the exponent adds goes too.
    addend = -((1024 if half else 128) / 2**place + 2 ** (bits - 1))
    base = 0x6400 if half else 0x4300
    mask = ((1 << width) - 1) << place
    lines = [".reg .b32 t, h, c;"]
    for i in range(2):
        lines.append(_shifted("t", f"${2 + i}", place - width * field))
        if bits == 8 and not half:
            # -128 where the value's top bit is set, else -256.
            lines += ["and.b32 c, t, 0x00800080;", "xor.b32 c, c, 0xC380C380;"]
            mask = 0x7F
        else:
            lines.append(f"mov.b32 c, {_twice(addend, dtype)};")
        lines.append(f"lop3.b32 t, t, 0x{mask:04X}{mask:04X}, 0x{base:04X}{base:04X}, 0xEA;")
        if bits == 6:
            top = 3 << (4 + place)
            lines += [
                f"prmt.b32 h, $4, 0, {'0x4342' if i else '0x4140'};",
                _shifted("h", "h", 4 + place - 2 * field),
                f"lop3.b32 t, h, 0x{top:04X}{top:04X}, t, 0xEA;",
            ]
        lines += [f"mov.b32 h, {_twice(2.0**-place, dtype)};", f"fma.rn.{_kind(dtype)} ${i}, t, h, c;"]
    return "{" + " ".join(lines) + "}"


def _shifted(target: str, source: str, left: int) -> str:
    if left == 0:
        return f"mov.b32 {target}, {source};"
    return f"{'shl' if left > 0 else 'shr'}.b32 {target}, {source}, {abs(left)};"


def _product(dtype: torch.dtype) -> str:
    # Ampere has no bf16x2 product, but a fused multiply-add, here of -0.
    return f"{{.reg .b32 c; mov.b32 c, {_twice(-0.0, dtype)}; fma.rn.{_kind(dtype)} $0, $1, $2, c;}}"


def _kind(dtype: torch.dtype) -> str:
    return "f16x2" if dtype == torch.float16 else "bf16x2"


def _twice(value: float, dtype: torch.dtype) -> str:
    """A register of two equal numbers."""
    word = torch.tensor(value, dtype=dtype).view(torch.int16).item() & 0xFFFF
    return f"0x{word:04X}{word:04X}"


@triton.jit
def unpack_field(low, high, dtype: tl.constexpr, field: tl.constexpr, bits: tl.constexpr, asm: tl.constexpr):
    """Codes of a field of `low` (and `high`, for 6 bits), in `dtype`."""
    if asm == "":
        wide = low.to(tl.int32)
        if bits == 8:
            code = ((wide >> (8 * field)) & 255) - 128
        elif bits == 6:
            code = (((wide >> (4 * field)) & 15) | ((high.to(tl.int32) >> (2 * field)) & 3) << 4) - 32
        else:
            code = ((wide >> (4 * field)) & 15) - 8
        return code.to(dtype)
    elif bits == 6:
        if dtype == tl.float16:
            return tl.inline_asm_elementwise(asm, "=&r,=&r,r,r,r", [low, high], tl.float16, is_pure=True, pack=4)
        else:
            return tl.inline_asm_elementwise(asm, "=&r,=&r,r,r,r", [low, high], tl.bfloat16, is_pure=True, pack=4)
    elif dtype == tl.float16:
        return tl.inline_asm_elementwise(asm, "=&r,=&r,r,r", [low], tl.float16, is_pure=True, pack=4)
    else:
        return tl.inline_asm_elementwise(asm, "=&r,=&r,r,r", [low], tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def multiply(a, b, asm: tl.constexpr):
    if asm == "":
        return a * b
    elif a.dtype == tl.float16:
        return tl.inline_asm_elementwise(asm, "=r,r,r", [a, b], tl.float16, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise(asm, "=r,r,r", [a, b], tl.bfloat16, is_pure=True, pack=2)
