"""The Hopper kernels as Triton 3.6.0 compiles them, which goes with torch 2.10 and 2.11.

`make test-all ONLY=triton` fetches it.

It is the Triton for which `warpgroup_refusal` keeps a warpgroup's products out of GEMMs.
"""

from pathlib import Path

import pytest

from tests.support.kernel_launches import every_kernel
from tests.support.offline import SHARED_LIMIT, compiled

TRITON = Path(__file__).parents[2] / "build/triton-3.6.0"

pytestmark = pytest.mark.skipif(
    not (TRITON / "triton").is_dir(), reason="needs Triton 3.6.0 beside the other: make test-all ONLY=triton fetches it"
)


def launches():
    for name, call in every_kernel():
        yield name, 90, call


@pytest.fixture(scope="module")
def binaries():
    return compiled(__file__, TRITON)


def test_no_product_loses_its_operands(binaries):
    assert binaries.keys() == {name for name, _ in every_kernel()}
    assert all(binaries.values())
    for name, each in binaries.items():
        for binary in each:
            assert binary.overwritten == [], name
            assert binary.shared <= SHARED_LIMIT[90], name
            assert not binary.spills_in_a_main_loop(), name
