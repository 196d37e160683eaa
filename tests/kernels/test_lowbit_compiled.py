"""What the shipped 8-bit and simulated configurations use of a GPU, read from their machine code."""

from functools import partial

import pytest
import torch
from kernel_inputs import random_call
from offline import SHARED_LIMIT, compiled

from diffquant.kernels.arguments import PairNorm, Visibility
from diffquant.scheme import Scheme

INT8 = [
    ("v1", 90, 128, "fp8"),
    ("v1", 90, 128, "fp16"),
    ("v2", 90, 128, "fp8"),
    ("v1", 90, 64, "fp8"),
    ("v1", 80, 128, "fp16"),
    ("v1", 80, 64, "fp16"),
]
SIMULATED = [("v1", capability, width, "8:row:shift") for capability in (80, 90) for width in (64, 128)]


def named(cases):
    return [f"{generation}-sm_{capability}-d{width}-{how}" for generation, capability, width, how in cases]


def launches():
    import diffquant.kernels.prefill_int8 as int8
    from diffquant.kernels import simulated

    # There is no device whose capability could be asked.
    int8.refused = simulated.refused = lambda *_, **__: None
    for (generation, capability, width, how), name in zip(INT8 + SIMULATED, named(INT8 + SIMULATED), strict=True):
        q, k, v, lam = random_call(generation, 256, 256, width=width, dtype=torch.bfloat16)
        post = PairNorm(1e-5, torch.ones(v.shape[-1]), 0.8)
        call = (
            partial(int8.prefill_int8, pv=how)
            if how.startswith("fp")
            else partial(simulated.simulated, scheme=Scheme.parse(how))
        )
        yield name, capability, partial(call, q, k, v, lam, scale=0.125, seen=Visibility(), post=post)


@pytest.fixture(scope="module")
def binaries():
    return compiled(__file__)


@pytest.mark.parametrize("name", named(INT8 + SIMULATED))
def test_a_shipped_configuration_fits(name, binaries):
    for binary in binaries[name]:
        assert binary.shared <= SHARED_LIMIT[binary.capability]
        assert not binary.spills_in_a_main_loop()
