"""The Hopper kernels as Triton 3.6.0 compiles them, which goes with torch 2.10 and 2.11: `make test-triton` fetches it.

It is the Triton for which `unpacked_product_refusal` keeps one kernel away from Hopper.
"""

from pathlib import Path

import pytest

from tests.support.kernel_launches import every_kernel
from tests.support.offline import SHARED_LIMIT, compiled

TRITON = Path(__file__).parents[2] / "build/triton-3.6.0"
# The launch code keeps all GEMMs away; at 6 bits the check finds nothing overwritten.
REFUSED = ("GEMM 8 bits", "GEMM 4 bits")

pytestmark = pytest.mark.skipif(
    not (TRITON / "triton").is_dir(), reason="needs Triton 3.6.0 beside the other: make test-triton fetches it"
)


def launches():
    for name, call in every_kernel():
        yield name, 90, call


@pytest.fixture(scope="module")
def binaries():
    return compiled(__file__, TRITON)


def test_no_product_loses_its_operands(binaries):
    assert len(binaries) == 64
    assert all(binaries.values())
    for name, each in binaries.items():
        for binary in each:
            assert name in REFUSED or binary.overwritten == [], name
            assert binary.stored_over == [], name
            assert binary.shared <= SHARED_LIMIT[90], name
            assert not binary.spills_in_a_main_loop(), name


@pytest.mark.parametrize("name", REFUSED)
def test_the_one_that_does_is_the_one_that_is_refused(binaries, name):
    """Were it compiled rightly, the refusal could go; were the check blind, it would see nothing here either."""
    assert binaries[name][0].overwritten
