"""What warp-specialized attention uses of a GPU, read from its machine code."""

from functools import partial

import pytest
import torch

from diffquant.family.norm import PairNorm
from diffquant.recipe.scheme import Scheme
from tests.support.kernel_inputs import on_call, random_call
from tests.support.offline import SHARED_LIMIT, compiled
from tests.support.thorough import thorough

pytestmark = thorough

CASES = [("v1", 128, "16"), ("v2", 64, "16"), ("v1", 128, "8"), ("v2", 64, "8"), ("v1", 128, "8:row:shift")]
NAMES = [f"{generation}-d{width}-{how}" for generation, width, how in CASES]


def launches():
    from diffquant.kernels.attention.prefill_simulated import prefill_simulated
    from diffquant.kernels.attention.prefill_specialized import prefill_specialized

    for name, (generation, width, how) in zip(NAMES, CASES, strict=True):
        q, k, v, lam = random_call(generation, 256, 256, width=width, dtype=torch.bfloat16)
        post = PairNorm(1e-5, torch.ones(v.shape[-1]), 0.8)
        call = (
            partial(on_call(prefill_specialized), bits=int(how))
            if ":" not in how
            else partial(on_call(prefill_simulated), scheme=Scheme.parse(how), specialized=True)
        )
        yield name, 90, partial(call, q, k, v, lam, scale=0.125, post=post)


def _by_length(binary):
    """Loops of both warpgroups over keys that every query sees, then those at the edge."""
    return sorted(binary.main_loops, key=lambda loop: sum(loop.values()))


@pytest.fixture(scope="module")
def binaries():
    return compiled(__file__)


@pytest.mark.parametrize("name", NAMES)
def test_it_fits_and_does_not_spill(binaries, name):
    binary = binaries[name][-1]
    assert binary.is_specialized
    assert binary.shared <= SHARED_LIMIT[90]
    *inner, _, _ = _by_length(binary)
    assert not any(loop.get("LDL", 0) + loop.get("STL", 0) for loop in inner)
    # The edge's loops are one step or two of a row's.
    assert all(loop.get("LDL", 0) <= 2 and loop.get("STL", 0) <= 2 for loop in binary.main_loops)
    assert not binary.waits_for_each_product()
    assert binary.overwritten == []


@pytest.mark.parametrize("name", NAMES)
def test_warpgroups_go_their_own_ways(binaries, name):
    """No barrier of the block in a loop: a warpgroup meets only itself, before it frees K or V or passes the turn."""
    binary = binaries[name][-1]
    # Keys that every query sees and those at the edge, for each of two warpgroups.
    assert len(binary.main_loops) == 4
    assert binary.barriers == [0] * 4
    for loop in binary.main_loops:
        assert loop["BAR"] == 3
        assert "STS" not in loop
        # Only row maxima and sums (of weights, or of weights and clipped logits) cross lanes: two rows of a thread,
        # two exchanges each.
        assert loop["SHFL"] <= 8
    *inner, _, _ = _by_length(binary)
    assert all("FSEL" not in loop for loop in inner)


def test_rounded_logits_are_contracted_nowhere(binaries):
    # One fused operation for each of the two the quotient asks for: none was made of a product and a sum.
    for loop in binaries["v1-d128-8:row:shift"][-1].main_loops:
        assert loop["FFMA"] == 2 * loop["MUFU"]


@pytest.mark.parametrize("name", NAMES)
def test_products_run_asynchronously_at_their_width(binaries, name):
    wanted = {"IGMMA", "QGMMA"} if name.endswith("-8") else {"HGMMA"}
    for loop in binaries[name][-1].main_loops:
        assert {opcode for opcode in loop if "MMA" in opcode} == wanted


@pytest.mark.parametrize("name", NAMES)
def test_products_of_halves_run_behind_exponentials(binaries, name):
    # PV: two thirds of V1's products, whose values are twice as wide as keys, and half of V2's.
    wanted = 0.0 if name.endswith("-8") else 2 / 3 if name.startswith("v1") else 1 / 2
    assert binaries[name][-1].hiding == pytest.approx([wanted] * 4, abs=0.02)
