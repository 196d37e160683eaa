"""What the shipped prefill configurations use of a GPU, read from their machine code."""

from functools import partial

import pytest
import torch
from kernel_inputs import random_call
from offline import SHARED_LIMIT, compiled

from diffquant.kernels.arguments import PairNorm, Visibility

CASES = [(g, capability, width) for g in ("v1", "v2") for capability in (80, 90) for width in (64, 128)]
NAMES = [f"{g}-sm_{capability}-d{width}" for g, capability, width in CASES]


def launches():
    from diffquant.kernels.prefill import prefill

    for name, (generation, capability, width) in zip(NAMES, CASES, strict=True):
        q, k, v, lam = random_call(generation, 256, 256, width=width, dtype=torch.bfloat16)
        post = PairNorm(1e-5, torch.ones(v.shape[-1]), 0.8)
        yield name, capability, partial(prefill, q, k, v, lam, scale=0.125, seen=Visibility(), post=post)


@pytest.fixture(scope="module")
def binaries():
    return compiled(__file__)


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_configuration_fits_and_uses_the_tensor_cores(name, binaries):
    (binary,) = binaries[name]
    assert binary.shared <= SHARED_LIMIT[binary.capability]
    assert binary.main_loops
    assert not binary.spills_in_a_main_loop()
    assert not binary.waits_for_each_product()
    products = "HGMMA" if binary.capability == 90 else "HMMA"
    assert all(loop.get(products) for loop in binary.main_loops)


@pytest.mark.parametrize("name", NAMES)
def test_unmasked_keys_run_without_mask_or_exchange_between_warps(name, binaries):
    (binary,) = binaries[name]
    inner, edge = sorted(binary.main_loops, key=lambda loop: sum(loop.values()))
    assert "FSEL" not in inner
    assert "FSEL" in edge
    # Weights go from one product to the next in registers: what is stored to shared memory is none of them.
    assert inner.get("STS", 0) == 0
    loads = "UTMALDG" if binary.capability == 90 else "LDGSTS"
    assert inner.get(loads)
