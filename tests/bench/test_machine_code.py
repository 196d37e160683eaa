"""The checks for registers that are written while Hopper's products may still read them, and more, on small loops."""

import pytest

from diffquant.bench.gpu.machine_code import (
    barriers_stored_over,
    block_barriers,
    counted,
    innermost_loops,
    instructions,
    multiply_adds,
    overwritten_operands,
    under_way_at_exponentials,
)

PRODUCT = "HGMMA.64x128x16.F32 R24, R88, gdesc[UR4].tnspB, R24, gsb0"
FROM_SHARED = "HGMMA.64x128x16.F32 R24, gdesc[UR4].tnspB, R24, gsb0"
WAIT_FOR_ALL, LEAVE_ONE = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"
UNPACK = "LOP3.LUT R90, R3, 0xf, RZ, 0xc0, !PT"


def loop_of(*texts):
    """A dump of these instructions in a loop, one before it and one behind it."""
    lines = ["MOV R1, c[0x0][0x28]", *texts, "@P1 BRA 0x10", "EXIT"]
    return "\n".join(f"        /*{16 * i:04x}*/                   {text} ;" for i, text in enumerate(lines))


def faults(*texts):
    (loop,) = innermost_loops(instructions(loop_of(*texts)))
    return overwritten_operands(loop)


@pytest.mark.parametrize(
    ("texts", "written"),
    [
        ((PRODUCT, WAIT_FOR_ALL, UNPACK), []),
        ((PRODUCT, UNPACK, WAIT_FOR_ALL), ["0x20: " + UNPACK]),
        # The product is waited for in the next pass, behind the writing.
        ((UNPACK, PRODUCT, LEAVE_ONE), ["0x10: " + UNPACK]),
        ((UNPACK, WAIT_FOR_ALL, PRODUCT), ["0x10: " + UNPACK]),
        ((WAIT_FOR_ALL, UNPACK, PRODUCT), []),
        # Only the older of two groups is waited for.
        ((PRODUCT, PRODUCT.replace("R88", "R92"), LEAVE_ONE, "MOV R93, R2", WAIT_FOR_ALL), ["0x40: MOV R93, R2"]),
        ((PRODUCT, PRODUCT.replace("R88", "R92"), LEAVE_ONE, "MOV R89, R2", WAIT_FOR_ALL), []),
        # Four registers a load, the third of which is an operand; a store writes none.
        ((PRODUCT, "LDS.128 R84, [R2]", WAIT_FOR_ALL), []),
        ((PRODUCT, "LDS.128 R88, [R2]", WAIT_FOR_ALL), ["0x20: LDS.128 R88, [R2]"]),
        ((PRODUCT, "STS.128 [R2], R88", WAIT_FOR_ALL), []),
        # The destination stands behind a predicate.
        ((PRODUCT, "ISETP.GE.AND P0, PT, R88, R2, PT", WAIT_FOR_ALL), []),
        ((PRODUCT, "SHFL.BFLY PT, R91, R5, 0x2, 0x1f", WAIT_FOR_ALL), ["0x20: SHFL.BFLY PT, R91, R5, 0x2, 0x1f"]),
        ((FROM_SHARED, UNPACK, WAIT_FOR_ALL), []),
    ],
)
def test_writes_are_held_to_the_products_under_way(texts, written):
    assert faults(*texts) == written


def test_loops_are_the_innermost():
    inner = loop_of("FADD R1, R2, R3", "FMUL R1, R1, R1", "@!P0 BRA 0x20")
    (loop,) = innermost_loops(instructions(inner))
    assert counted(loop) == {"FMUL": 1, "BRA": 1}
    assert counted(instructions(inner)) == {"MOV": 1, "FADD": 1, "BRA": 2, "FMUL": 1, "EXIT": 1}


def test_products_are_counted_by_the_width_of_what_they_multiply():
    texts = (PRODUCT, FROM_SHARED, "QGMMA.64x256x32.F32.E4M3.E4M3 R24, R4, gdesc[UR8], R24, gsb0")
    texts += ("IGMMA.64x128x32.S8.S8 R24, gdesc[UR8], !UPT", "HMMA.16816.F32 R4, R8, R2, R4", "IMMA.16832.S8.S8 R4, R8")
    (loop,) = innermost_loops(instructions(loop_of(*texts)))
    halves, bytes_ = 2 * 64 * 128 * 16 + 16 * 8 * 16, 64 * 256 * 32 + 64 * 128 * 32 + 16 * 8 * 32
    assert multiply_adds(loop) == {"16": halves, "8": bytes_}


def test_a_barrier_of_one_warpgroup_is_none_of_the_block():
    dump = loop_of("BAR.SYNC.DEFER_BLOCKING 0x0", "BAR.SYNC.DEFER_BLOCKING 0x1, 0x80", "BAR.ARV 0x2, 0x100")
    (loop,) = innermost_loops(instructions(dump))
    assert block_barriers(loop) == 1


@pytest.mark.parametrize(
    ("texts", "share"),
    [
        ((PRODUCT, WAIT_FOR_ALL, "MUFU.EX2 R1, R1"), 0.0),
        ((PRODUCT, "MUFU.EX2 R1, R1", WAIT_FOR_ALL), 1.0),
        # Of two, the older is waited for; then the younger one too.
        ((PRODUCT, FROM_SHARED, LEAVE_ONE, "MUFU.EX2 R1, R1", WAIT_FOR_ALL), 0.5),
        ((PRODUCT, FROM_SHARED, LEAVE_ONE, "MUFU.EX2 R1, R1", WAIT_FOR_ALL, "MUFU.EX2 R1, R1"), 0.25),
        # What the pass before left is waited for behind the exponentials of this one.
        (("MUFU.EX2 R1, R1", WAIT_FOR_ALL, PRODUCT), 1.0),
        (("MUFU.RCP R1, R1", PRODUCT, WAIT_FOR_ALL), 0.0),
    ],
)
def test_products_under_way_hide_behind_exponentials(texts, share):
    (loop,) = innermost_loops(instructions(loop_of(*texts)))
    assert under_way_at_exponentials(loop) == share


SET_UP = "SYNCS.EXCH.64 URZ, [UR5+0x38008], UR22"


@pytest.mark.parametrize(
    ("store", "is_over"),
    [
        ("STS [UR5+0x38008], R4", True),
        ("STS.128 [UR5+0x38000], R4", True),
        ("STS.64 [UR5+0x38000], R4", False),
        ("STS.64 [UR5+0x38010], R4", False),
        ("STS.U8 [UR4+0x3800f], R4", True),
        ("STS.U8 [UR4+0x38007], R4", False),
        # From the memory's beginning on, and at a place that each thread computes.
        ("STS [UR5], R4", False),
        ("STS [R3], R4", False),
        ("LDS.128 R4, [UR5+0x38000]", False),
    ],
)
def test_a_barrier_and_what_is_stored_have_bytes_of_their_own(store, is_over):
    for texts in ((SET_UP, store), (store, SET_UP)):
        found = barriers_stored_over(instructions(loop_of(*texts)))
        assert [fault.partition(": ")[2] for fault in found] == ([SET_UP] if is_over else [])
