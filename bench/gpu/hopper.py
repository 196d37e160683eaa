"""A cost model of Hopper: how long a kernel's main loop takes, from what its machine code asks of a multiprocessor.

A multiprocessor issues four instructions a cycle, one from each scheduler, computes 16 special functions a cycle, and
multiplies at a fixed rate. Work that overlaps takes as long as its slowest part: so where warps of different blocks,
or groups of warps with loops of their own, are at different places. Where all warps of a lone block meet at a barrier
in every step, products and the other instructions take turns and their times add up. No kernel reaches either bound:
what published kernels of both forms reach is taken off.
"""

from dataclasses import dataclass
from math import ceil

from diffquant.bench.gpu.binaries import Binary
from diffquant.kernels import gpu
from diffquant.kernels.gpu import COPY_REACHES, AbsentGpu

PROCESSORS = 132
# Of an H100 or H200 (SXM): the clock at which the data sheet's 989 TFLOP/s of dense fp16 are 4,096 operations
# a cycle and SM.
CLOCK_HZ = 1.83e9
MULTIPLY_ADDS_A_CYCLE = {"16": 2048, "8": 4096}
# A warp's own products (mma.sync) reach so much of wgmma's speed (arXiv 2402.13499, table of dense mma on H100).
WARP_PRODUCTS = 0.62
SPECIAL_A_CYCLE = 16
SCHEDULERS = 4
# From launch to a full stream of loads, and from the last load to the end: an assumption, and so is that half of it
# passes while the kernel ahead ends, where loads do not wait for that.
RAMP_SECONDS = 2e-6
# FlashAttention-3 (616 TFLOP/s, causal, 16K, d 128; arXiv 2407.08608) is bound by its products and overlaps the rest: a
# warpgroup's softmax with the other's products, and with its own, of which PV, half of them, is under way meanwhile.
PIPELINED, HIDING = 616 / 989, 0.5
# Where a warpgroup waits for each product where it asks for it, it reaches 582 of 661 TFLOP/s (the same paper's
# ablation).
OVERLAPPED = PIPELINED * 582 / 661
# Triton's tutorial kernel (477 TFLOP/s, same shape) has the loop of `prefill_v2`: 2,048 cycles of products and 1,030
# of other instructions.
TAKING_TURNS = 477 / 989 * (2048 + 1030) / 2048


@dataclass(frozen=True)
class Card:
    """A card of Hopper's: its name, the bytes a second that a copy moves, and what launch code is told of it."""

    name: str
    bytes_a_second: float
    absent: AbsentGpu


H100 = Card("H100", 3.35e12 * COPY_REACHES, gpu.H100)
H200 = Card("H200", 4.8e12 * COPY_REACHES, gpu.H200)
CARDS = (H100, H200)

_REGISTERS, _SHARED, _WARPS, _RESERVED = 65_536, 233_472, 64, 1024

ASSUMPTIONS = f"""\
H100 and H200: {PROCESSORS} multiprocessors at {CLOCK_HZ / 1e9:.2f} GHz, \
{MULTIPLY_ADDS_A_CYCLE["16"]:,} multiply-adds a cycle \
of 16 bits and twice as many of 8, {WARP_PRODUCTS:.0%} of that by mma.sync;
{SCHEDULERS} instructions and {SPECIAL_A_CYCLE} special functions a cycle; \
{" and ".join(f"{card.bytes_a_second / 1e12:.2f}" for card in CARDS)} TB/s; \
{RAMP_SECONDS * 1e6:.0f} us a launch where memory sets the pace, half of it
where the kernel loads before the one ahead of it ends.
A step takes as long as the slowest of its products, instructions and special functions, at {OVERLAPPED:.0%} \
(FlashAttention-3's share without overlap within a warpgroup), or up to {PIPELINED:.0%} (its share) by what a
warpgroup has under way while it computes exponentials; where all warps of a lone
block meet in every step, products and instructions one after the other, at {TAKING_TURNS:.0%} (the share of Triton's \
tutorial kernel). Where each block has one step, it computes when all that it asked for has come. \
Nothing here was measured."""


@dataclass(frozen=True)
class Step:
    """Cycles that a multiprocessor spends on one step of one block, by what is busy.

    Attributes:
        products: cycles of tensor cores.
        instructions: cycles of the schedulers.
        special: cycles of the special-function units.
        barriers: number of barriers at which the whole block meets.
        hiding: share of the products that is under way while exponentials are computed.
        takes_turns: whether products and other instructions take turns.
    """

    products: float
    instructions: float
    special: float
    barriers: int
    hiding: float
    takes_turns: bool

    @property
    def cycles(self) -> float:
        """Cycles expected of it."""
        if self.takes_turns:
            return (self.products + self.instructions) / TAKING_TURNS
        reached = OVERLAPPED + (PIPELINED - OVERLAPPED) * min(1.0, self.hiding / HIDING)
        return max(self.products, self.instructions, self.special) / reached


def blocks_at_once(binary: Binary) -> int:
    """Number of a kernel's blocks that one multiprocessor holds at a time."""
    registers = ceil(binary.registers / 8) * 8 * 32 * binary.warps
    by_shared = _SHARED // (binary.shared + _RESERVED)
    return max(1, min(_REGISTERS // registers, by_shared, _WARPS // binary.warps))


def resident(binary: Binary, programs: int) -> int:
    """Number of a launch's equal blocks that a multiprocessor has at a time; of unequal ones there are always more."""
    return min(blocks_at_once(binary), ceil(programs / PROCESSORS)) if programs else blocks_at_once(binary)


def step(binary: Binary, programs: int = 0) -> Step | None:
    """Cost of one step of a block's inner loop, without masking, or None if no loop multiplies.

    Warps that are specialized come in warpgroups with two loops each, the inner and the edge's.
    """
    if not binary.main_loops:
        return None
    by_length = sorted(range(len(binary.main_loops)), key=lambda i: sum(binary.main_loops[i].values()))
    consumers = max(1, len(by_length) // 2) if binary.is_specialized else 1
    inner = by_length[:consumers]
    warps = 4 if binary.is_specialized else binary.warps
    products = instructions = special = 0.0
    for i in inner:
        loop = binary.main_loops[i]
        wide = any(kind in loop for kind in ("HGMMA", "IGMMA", "QGMMA"))
        groups = warps / 4 if wide else warps / WARP_PRODUCTS
        products += groups * sum(count / MULTIPLY_ADDS_A_CYCLE[bits] for bits, count in binary.products[i].items())
        instructions += sum(loop.values()) * warps / SCHEDULERS
        special += loop.get("MUFU", 0) * warps * 32 / SPECIAL_A_CYCLE
    barriers = max(binary.barriers[i] for i in inner)
    lone = resident(binary, programs) == 1
    hiding = min(binary.hiding[i] for i in inner)
    return Step(products, instructions, special, barriers, hiding, takes_turns=barriers > 0 and lone)


def seconds(binary: Binary, card: Card, steps: float, nbytes: float, programs: int = 0) -> float:
    """Time that a launch is expected to take.

    Args:
        steps: number of steps of all its blocks.
        nbytes: bytes that it moves between processors and memory, each once.
        programs: number of equal blocks, whose last wave may leave processors idle; 0 where they are unequal and
            the longest start first.
    """
    each = step(binary, programs)
    computing = 0.0 if each is None else steps * each.cycles / (PROCESSORS * CLOCK_HZ)
    slots = PROCESSORS * resident(binary, programs)
    idle = ceil(programs / slots) * slots / programs if programs else 1.0
    ramp = RAMP_SECONDS / 2 if binary.early_loads else RAMP_SECONDS
    moving = nbytes / card.bytes_a_second + ramp
    if programs and steps <= programs:
        # A block has one step: it asks for everything, and computes when that has come.
        return computing * idle + moving
    return max(computing * idle, moving)
