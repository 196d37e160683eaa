"""The checks for registers that are written while Hopper's products may still read them, and more, on small loops."""

from tests.support.machine_code import innermost_loops, instructions, overwritten_operands, under_way_at_exponentials
from tests.support.tables import in_one_test

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


@in_one_test(
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


@in_one_test(
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
