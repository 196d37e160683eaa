"""Machine code of NVIDIA's GPUs as cuobjdump prints it: its loops, what they use, and what is written too early.

Hopper's matrix products run asynchronously. A warpgroup closes a group of them with a product that names the
scoreboard gsb0, and `WARPGROUP.DEPBAR.LE gsb0, N` waits until at most N closed groups are under way. Until then a
product may still read the registers of its left side; whoever writes them changes its result.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(.*?);", re.MULTILINE)
_PRODUCTS = ("HGMMA", "IGMMA", "QGMMA")
# A warp's own product: HMMA.16816 is 16 rows, 8 columns, 16 deep.
_WARP_SHAPE = re.compile(r"[HI]MMA\.(16)(8)(8|16|32)\b")
# The left side of a product of 64 rows, 16 columns of 16 bits or 32 of 8: four registers a thread.
_LEFT_REGISTERS = 4
_WRITE_NO_REGISTER = frozenset(
    {
        *("STS", "STG", "ST", "STL", "STSM", "RED", "BAR", "BRA", "BSSY", "BSYNC", "EXIT", "NOP", "WARPSYNC"),
        *("WARPGROUP", "UTMALDG", "UTMASTG", "UTMACCTL", "SYNCS", "LDGSTS", "LDGDEPBAR", "DEPBAR", "FENCE", "MEMBAR"),
        "ERRBAR",
    }
)


@dataclass(frozen=True)
class Instruction:
    """One instruction: its address, and its text without predicate."""

    address: int
    text: str

    @property
    def opcode(self) -> str:
        """Name before its first dot."""
        return re.split(r"[.\s]", self.text, maxsplit=1)[0]

    @property
    def operands(self) -> list[str]:
        parts = self.text.split(None, 1)
        return [operand.strip() for operand in parts[1].split(",")] if len(parts) > 1 else []


Code = list[Instruction]


def instructions(sass: str) -> Code:
    """All instructions of a dump."""
    return [Instruction(int(address, 16), text.strip()) for address, text in _LINE.findall(sass)]


def innermost_loops(code: Code) -> list[Code]:
    """Loops that hold no other: from the target of a backward jump to the jump."""
    index_by_address = {each.address: i for i, each in enumerate(code)}
    spans = set()
    for i, each in enumerate(code):
        jump = re.match(r"BRA\b.*?(0x[0-9a-f]+)", each.text)
        if jump and (target := int(jump[1], 16)) < each.address:
            spans.add((index_by_address[target], i))
    inner = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    return [code[first : last + 1] for first, last in sorted(inner)]


def counted(code: Code) -> dict[str, int]:
    """Number of times each opcode occurs."""
    return dict(Counter(each.opcode for each in code))


def multiply_adds(code: Code) -> dict[str, int]:
    """Multiply-adds of the products in a stretch of code, by the width of their operands in bits.

    One product is a warpgroup's where it is asynchronous (`HGMMA.64x128x16`), and else a warp's (`HMMA.16816`).
    """
    totals: Counter[str] = Counter()
    for each in code:
        name = each.text.split()[0]
        if each.opcode in _PRODUCTS:
            rows, columns, depth = map(int, re.findall(r"\d+", name.split(".")[1])[:3])
        elif shape := _WARP_SHAPE.match(name):
            rows, columns, depth = map(int, shape.groups())
        else:
            continue
        totals["16" if each.opcode.startswith("H") else "8"] += rows * columns * depth
    return dict(totals)


def block_barriers(code: Code) -> int:
    """Number of barriers in a stretch of code at which all warps of a block meet.

    Those of a part of the block name a number of threads: `BAR.SYNC.DEFER_BLOCKING 0x1, 0x80`.
    """
    return sum(each.opcode == "BAR" and ".SYNC" in each.text and len(each.operands) < 2 for each in code)


def _with_products_under_way(loop: Code) -> Iterator[tuple[Instruction, Code]]:
    """Each instruction of two passes that is no product and waits for none, and the products that are under way then.

    Two, since products of one pass may be waited for in the next, which is then like any other.
    """
    closed: list[Code] = []
    opened: Code = []
    for each in loop + loop:
        if each.opcode in _PRODUCTS:
            opened.append(each)
            if any("gsb" in operand for operand in each.operands):
                closed.append(opened)
                opened = []
        elif each.text.startswith("WARPGROUP.DEPBAR"):
            allowed = int(each.operands[-1], 16)
            closed = closed[len(closed) - allowed :] if allowed < len(closed) else closed
        else:
            yield each, [product for group in (*closed, opened) for product in group]


def under_way_at_exponentials(loop: Code) -> float:
    """Share of a loop's products that are under way while it computes exponentials, on average over these."""
    seen = [
        sum(multiply_adds(products).values())
        for each, products in _with_products_under_way(loop)
        if each.text.startswith("MUFU.EX2")
    ]
    last = seen[len(seen) // 2 :]
    total = sum(multiply_adds(loop).values())
    return sum(last) / len(last) / total if last and total else 0.0


def overwritten_operands(loop: Code) -> list[str]:
    """Instructions of a loop that write a register while a product of this pass or the last one may still read it."""
    faults = []
    for each, products in _with_products_under_way(loop):
        written = _written(each)
        if any(written & _registers(product.operands[1], _LEFT_REGISTERS) for product in products):
            faults.append(f"{each.address:#x}: {each.text}")
    return list(dict.fromkeys(faults))


def _written(each: Instruction) -> set[int]:
    """Numbers of the registers that an instruction other than a product writes."""
    if each.opcode in _WRITE_NO_REGISTER:
        return set()
    # Predicates may stand before the destination.
    target = next((operand for operand in each.operands[:2] if not re.match(r"U?P[\dT]", operand)), "")
    name = each.text.split()[0]
    wide = 4 if ".128" in name else 2 if ".64" in name or name.startswith("IMAD.WIDE") else 1
    return _registers(target, wide)


def _registers(operand: str, count: int) -> set[int]:
    named = re.match(r"R(\d+)", operand)
    return set(range(int(named[1]), int(named[1]) + count)) if named else set()
