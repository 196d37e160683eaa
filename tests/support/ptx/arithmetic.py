"""Integer and floating-point arithmetic, comparisons, logic and bits, lane by lane."""

from collections.abc import Callable
from functools import partial

import numpy as np

from tests.support.ptx.block import Block, Mask, opcode
from tests.support.ptx.parsing import SIZES, Fault, Instruction
from tests.support.ptx.values import BITS, FLOATS, Array, flushed, number_type

_COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {"eq": np.equal, "ne": np.not_equal, "lt": np.less}
_COMPARISONS |= {"le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
_WIDER = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}


def _elementwise(b: Block, i: Instruction, mask: Mask, compute: Callable[..., Array]) -> None:
    """Set a register to a function of all operands, each read as the instruction's type and rounded to it."""
    kind = i.type
    numbers = [b.read(each, kind) for each in i.operands[1:]]
    if kind == "f32" and i.has("ftz"):
        computed = flushed(compute(*map(flushed, numbers)).astype(np.float32, copy=False))
    else:
        computed = compute(*numbers)
    b.write(i.operands[0], computed, kind, mask)


_SIMPLE: dict[str, tuple[str, Callable[..., Array]]] = {
    "add": ("rn ftz", lambda x, y: x + y),
    "sub": ("rn ftz", lambda x, y: x - y),
    "rem": ("", lambda x, y: np.where(y == 0, 0, np.fmod(x, np.where(y == 0, 1, y)))),
    "rcp": ("approx rn ftz", lambda x: np.float32(1) / x),
    "sqrt": ("approx rn ftz", np.sqrt),
    "rsqrt": ("approx ftz", lambda x: np.float32(1) / np.sqrt(x)),
    "ex2": ("approx ftz", np.exp2),
    "lg2": ("approx ftz", np.log2),
    "neg": ("ftz", np.negative),
    "abs": ("ftz", np.abs),
}
for _name, (_modifiers, _compute) in _SIMPLE.items():
    opcode(_name, _modifiers)(partial(_elementwise, compute=_compute))


@opcode("mul", "rn ftz lo hi wide")
def multiply(b: Block, i: Instruction, mask: Mask) -> None:
    if i.has("wide") or i.has("hi"):
        product = _wide_product(b, i)
        if i.has("hi"):
            shift = product.dtype.type(8 * SIZES[i.type])
            b.write(i.operands[0], (product >> shift).astype(number_type(i.type)), i.type, mask)
        else:
            b.write(i.operands[0], product, _WIDER[i.type], mask)
        return
    _elementwise(b, i, mask, lambda x, y: x * y)


@opcode("mad", "lo wide")
def multiply_add(b: Block, i: Instruction, mask: Mask) -> None:
    if i.has("wide"):
        wide = _WIDER[i.type]
        b.write(i.operands[0], _wide_product(b, i) + b.read(i.operands[3], wide), wide, mask)
    else:
        _elementwise(b, i, mask, lambda x, y, z: x * y + z)


def _wide_product(b: Block, i: Instruction) -> Array:
    if i.type not in _WIDER:
        raise Fault(f"unknown product: {i.text}")
    x, y = (b.read(each, i.type).astype(number_type(_WIDER[i.type])) for each in i.operands[1:3])
    product: Array = x * y
    return product


@opcode("fma", "rn ftz relu")
def fused(b: Block, i: Instruction, mask: Mask) -> None:
    if i.has("relu"):
        raise Fault(f"unknown product: {i.text}")
    # The product of two float32 is exact in float64, where the sum is rounded once before it is rounded to float32.
    _elementwise(b, i, mask, lambda x, y, z: x.astype(np.float64) * y.astype(np.float64) + z.astype(np.float64))


@opcode("div", "rn ftz full approx")
def divide(b: Block, i: Instruction, mask: Mask) -> None:
    if i.type in FLOATS:
        _elementwise(b, i, mask, lambda x, y: x / y)
    else:
        _elementwise(b, i, mask, _whole_quotient)


def _whole_quotient(x: Array, y: Array) -> Array:
    """Quotients towards zero; 0 for a divisor of 0, which is undefined."""
    y = np.where(y == 0, 1, y)
    return (x - np.fmod(x, y)) // y


@opcode("max min", "NaN xorsign abs relu ftz")
def extreme(b: Block, i: Instruction, mask: Mask) -> None:
    larger = i.opcode == "max"

    def chosen(*numbers: Array) -> Array:
        is_float = numbers[0].dtype.kind == "f"
        signs = np.signbit(numbers[0]) ^ np.signbit(numbers[1]) if i.has("xorsign") else None
        given = [np.abs(each) for each in numbers] if i.has("abs") else list(numbers)
        if is_float and not i.has("NaN"):
            pick: Callable[[Array, Array], Array] = np.fmax if larger else np.fmin
        else:
            pick = np.maximum if larger else np.minimum
        out = given[0]
        for each in given[1:]:
            out = pick(out, each)
        if signs is not None:
            out = np.where(signs, -out, out)
        return np.maximum(out, 0) if i.has("relu") else out

    _elementwise(b, i, mask, chosen)


@opcode("and or xor")
def logic(b: Block, i: Instruction, mask: Mask) -> None:
    x, y = (b.read(each, i.type) for each in i.operands[1:])
    b.write(i.operands[0], x & y if i.opcode == "and" else x | y if i.opcode == "or" else x ^ y, i.type, mask)


@opcode("not")
def complement(b: Block, i: Instruction, mask: Mask) -> None:
    b.write(i.operands[0], ~b.read(i.operands[1], i.type), i.type, mask)


@opcode("shl shr")
def shift(b: Block, i: Instruction, mask: Mask) -> None:
    numbers = b.read(i.operands[1], i.type)
    by, width = b.read(i.operands[2], "u32"), 8 * numbers.dtype.itemsize
    at = np.minimum(by, width - 1).astype(numbers.dtype)
    shifted = numbers << at if i.opcode == "shl" else numbers >> at
    if i.opcode == "shl" or numbers.dtype.kind == "u":
        shifted = np.where(by >= width, shifted.dtype.type(0), shifted)
    b.write(i.operands[0], shifted, i.type, mask)


@opcode("shf", "l r wrap clamp")
def funnel_shift(b: Block, i: Instruction, mask: Mask) -> None:
    low, high, by = (b.read(each, "u32").astype(np.uint64) for each in i.operands[1:4])
    both = high << np.uint64(32) | low
    at = by & np.uint64(31) if i.has("wrap") else np.minimum(by, np.uint64(32))
    shifted = (both << at) >> np.uint64(32) if i.has("l") else both >> at
    b.write(i.operands[0], shifted, "u32", mask)


@opcode("bfe")
def extract(b: Block, i: Instruction, mask: Mask) -> None:
    words = b.words(i.operands[1], SIZES[i.type]).astype(np.uint64)
    at, width = (b.words(each, 8) & np.uint64(255) for each in i.operands[2:4])
    kept = (np.uint64(1) << np.minimum(width, np.uint64(63))) - np.uint64(1)
    field = words >> np.minimum(at, np.uint64(63)) & kept
    if i.type.startswith("s"):
        negative = field >> (np.maximum(width, np.uint64(1)) - np.uint64(1)) & np.uint64(1)
        field = np.where(negative == 1, field | ~kept, field)
    b.set(i.operands[0], field.astype(BITS[SIZES[i.type]]), mask)


@opcode("bfi")
def insert(b: Block, i: Instruction, mask: Mask) -> None:
    new, old, at, width = (b.words(each, 4).astype(np.uint64) for each in i.operands[1:5])
    field = ((np.uint64(1) << width) - np.uint64(1)) << at
    b.write(i.operands[0], old & ~field | new << at & field, "u32", mask)


@opcode("prmt")
def permute(b: Block, i: Instruction, mask: Mask) -> None:
    low, high, chosen = (b.words(each, 4) for each in i.operands[1:4])
    both = np.stack([low, high], 1).view(np.uint8)
    selectors = chosen[:, None] >> np.array([0, 4, 8, 12], np.uint32) & np.uint32(15)
    picked = np.take_along_axis(both, (selectors & np.uint32(7)).astype(np.int64), 1)
    # The selector's highest bit asks for the byte's sign, eight times.
    signs = np.where(picked & np.uint8(128), np.uint8(255), np.uint8(0))
    picked = np.where(selectors & np.uint32(8), signs, picked)
    b.set(i.operands[0], picked.view(np.uint32)[:, 0], mask)


@opcode("lop3")
def logic_of_three(b: Block, i: Instruction, mask: Mask) -> None:
    x, y, z = (b.words(each, 4) for each in i.operands[1:4])
    table, out = int(i.operands[4], 0), np.zeros(b.threads, np.uint32)
    for case in range(8):
        if table >> case & 1:
            out |= (x if case & 4 else ~x) & (y if case & 2 else ~y) & (z if case & 1 else ~z)
    b.write(i.operands[0], out, "u32", mask)


@opcode("popc")
def count_bits(b: Block, i: Instruction, mask: Mask) -> None:
    b.write(i.operands[0], np.bitwise_count(b.words(i.operands[1], SIZES[i.type])), "u32", mask)


@opcode("clz")
def leading_zeros(b: Block, i: Instruction, mask: Mask) -> None:
    numbers = b.words(i.operands[1], SIZES[i.type]).astype(np.float64)
    used = np.where(numbers > 0, np.floor(np.log2(np.maximum(numbers, 1))) + 1, 0)
    b.write(i.operands[0], (8 * SIZES[i.type] - used).astype(np.uint32), "u32", mask)


@opcode("selp")
def select(b: Block, i: Instruction, mask: Mask) -> None:
    one, other = (b.words(each, SIZES[i.type]) for each in i.operands[1:3])
    b.set(i.operands[0], np.where(b.read(i.operands[3], "pred"), one, other), mask)


@opcode("setp", "eq ne lt le gt ge lo ls hi hs equ neu ltu leu gtu geu num nan and or xor ftz")
def compare(b: Block, i: Instruction, mask: Mask) -> None:
    x, y = (b.read(each, i.type) for each in i.operands[1:3])
    how = i.parts[1]
    if how in ("num", "nan"):
        out = np.isnan(x) | np.isnan(y)
        out = ~out if how == "num" else out
    else:
        plain = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(how, how[:2])
        out = _COMPARISONS[plain](x, y)
        if i.type in FLOATS and (len(how) == 3) != (how == "ne"):
            unordered = np.isnan(x) | np.isnan(y)
            # Names of three letters hold where a number is none. The others do not, as NumPy's but for "ne".
            out = out & ~unordered if how == "ne" else out | unordered
    combined = next((part for part in i.parts[2:] if part in ("and", "or", "xor")), "")
    if combined:
        other = np.repeat(b.read(i.operands[3], "pred"), out.size // b.threads)
        out = {"and": out & other, "or": out | other, "xor": out ^ other}[combined]
    targets = i.operands[0].split("|")
    # The second truth is that of the high half where two numbers are packed, and elsewhere the first one negated.
    low, high = (out[::2], out[1::2]) if i.type.endswith("x2") else (out, ~out)
    b.write(targets[0], low, "pred", mask)
    if len(targets) == 2:
        b.write(targets[1], high, "pred", mask)
