"""What the shipped 8-bit and simulated configurations use of a GPU, read from their machine code."""

from functools import partial

import pytest
import torch

from diffquant.family.norm import PairNorm
from diffquant.recipe.scheme import Scheme
from tests.support.kernel_inputs import on_call, random_call
from tests.support.offline import SHARED_LIMIT, compiled
from tests.support.thorough import thorough

pytestmark = thorough

INT8 = [
    ("v1", 90, 128, "fp8"),
    ("v1", 90, 128, "fp16"),
    ("v2", 90, 64, "fp8"),
    ("v1", 80, 128, "fp16"),
    ("v2", 80, 64, "fp16"),
]
SIMULATED = [("v1", capability, width, "8:row:shift") for capability in (80, 90) for width in (64, 128)]


def named(cases):
    return [f"{generation}-sm_{capability}-d{width}-{how}" for generation, capability, width, how in cases]


def launches():
    from diffquant.kernels.attention.prefill_int8 import prefill_int8
    from diffquant.kernels.attention.prefill_simulated import prefill_simulated

    for (generation, capability, width, how), name in zip(INT8 + SIMULATED, named(INT8 + SIMULATED), strict=True):
        q, k, v, lam = random_call(generation, 256, 256, width=width, dtype=torch.bfloat16)
        post = PairNorm(1e-5, torch.ones(v.shape[-1]), 0.8)
        call = (
            partial(on_call(prefill_int8), pv=how)
            if how.startswith("fp")
            else partial(on_call(prefill_simulated), scheme=Scheme.parse(how))
        )
        yield name, capability, partial(call, q, k, v, lam, scale=0.125, post=post)


@pytest.fixture(scope="module")
def binaries():
    return compiled(__file__)


@pytest.mark.parametrize("name", named(INT8 + SIMULATED))
def test_a_shipped_configuration_fits_and_does_not_spill(name, binaries):
    for binary in binaries[name]:
        assert binary.shared <= SHARED_LIMIT[binary.capability]
        assert not binary.spills_in_a_main_loop()
        assert not binary.overwritten


@pytest.mark.parametrize(("case", "name"), zip(INT8, named(INT8), strict=True), ids=named(INT8))
def test_eight_bit_products_run_on_eight_bit_tensor_cores(case, name, binaries):
    _, capability, _, pv = case
    *quantizing, attend = binaries[name]
    assert all(not binary.main_loops for binary in quantizing)
    wanted = {"IMMA", "HMMA"} if capability == 80 else {"IGMMA", "QGMMA" if pv == "fp8" else "HGMMA"}
    for loop in attend.main_loops:
        assert {opcode for opcode in loop if "MMA" in opcode} == wanted


@pytest.mark.parametrize("name", [name for name in named(INT8) if name.endswith("fp8")])
def test_probabilities_in_e4m3_stay_in_their_registers(name, binaries):
    inner, edge = sorted(binaries[name][-1].main_loops, key=lambda loop: sum(loop.values()))
    # Only row maxima and sums cross lanes: two rows of a thread, two exchanges each.
    assert inner["SHFL"] == edge["SHFL"] == 8
    assert "FSEL" not in inner


@pytest.mark.parametrize("name", named(SIMULATED))
def test_simulated_logits_use_the_tensor_cores_and_no_contraction(name, binaries):
    products = "HGMMA" if "sm_90" in name else "HMMA"
    extremes, attend = binaries[name]
    for loop in extremes.main_loops + attend.main_loops:
        assert loop.get(products)
    # One fused operation for each of the two the quotient asks for: none was made of a product and a sum.
    for loop in attend.main_loops:
        assert loop["FFMA"] == 2 * loop["MUFU"]
