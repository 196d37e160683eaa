"""A record of a compilation knows what was compiled: another code, constant or card is another digest."""

from functools import partial

import pytest
import torch

from tests.support.kernel_sources import sources


def kernels():
    """Kernels of one name: the first two alike but for what they say, the third computes something else."""
    triton = pytest.importorskip("triton")
    import triton.language as tl

    def first():
        @triton.jit
        def kernel(x, N: tl.constexpr):
            """Doubles."""
            at = x + tl.arange(0, N)
            tl.store(at, tl.load(at) * 2)

        return kernel

    def second():
        @triton.jit
        def kernel(x, N: tl.constexpr):
            """Twice as much."""
            # Of each element.
            at = x + tl.arange(0, N)

            tl.store(at, tl.load(at) * 2)

        return kernel

    def third():
        @triton.jit
        def kernel(x, N: tl.constexpr):
            """Doubles."""
            at = x + tl.arange(0, N)
            tl.store(at, tl.load(at) * 3)

        return kernel

    return {"first": first(), "second": second(), "third": third()}


def launches():
    x = torch.zeros(16)
    made = kernels()
    for name, kernel in made.items():
        yield name, 90, partial(kernel[(1,)], x, N=16)
    yield "again", 90, partial(made["first"][(1,)], x, N=16)
    yield "another constant", 90, partial(made["first"][(1,)], x, N=32)
    yield "another card", 80, partial(made["first"][(1,)], x, N=16)
    yield "another type", 90, partial(made["first"][(1,)], x.half(), N=16)
    yield "another option", 90, partial(made["first"][(1,)], x, N=16, num_warps=8)
    yield "nothing", 90, lambda: None


def test_a_digest_is_of_code_constants_types_options_and_card_alone():
    digests = sources(__file__)
    assert digests["nothing"] is None
    assert digests["first"] == digests["second"] == digests["again"]
    others = [digest for name, digest in digests.items() if name not in ("second", "again", "nothing")]
    assert len(set(others)) == len(others) == 6
