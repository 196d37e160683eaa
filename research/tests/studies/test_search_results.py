"""What the page on search says of its committed measurements under a budget of stored bits."""

import pytest

pytest.importorskip("scipy")

from diffquant.calib.search.allocation import Budget, allocate, average_bits
from diffquant.calib.search.units import Unit
from research.check.raw import raw

SHAPE_BYTES = 16


@pytest.mark.parametrize(("codes", "stored"), [("4.5", 5.0), ("5.5", 6.0)])
def test_with_16_bit_scales_a_budget_half_a_bit_larger_gives_every_weight_the_same_width(codes, stored):
    measured = raw(f"smollm2-search/search-{codes}-bits.json")["measurements"]
    costs, chosen = {}, {}
    for entry in measured:
        elements = entry["elements"]
        # A scale of 16 bits for 32 codes, and the shape that each packed weight has.
        sizes = {bits: elements * (bits + 0.5) / 8 + SHAPE_BYTES for bits in (4, 6, 8)}
        unit = Unit(
            target="weights",
            name=entry["name"],
            layer=entry["layer"],
            kind=entry["kind"],
            granularity="g32",
            elements=elements,
            stored=sizes,
        )
        costs[unit] = {int(bits): kl for bits, kl in entry["kl"].items()}
        chosen[unit] = entry["chosen"]
    assert len(chosen) == 210
    assert allocate(costs, Budget(bits=stored)) == chosen
    assert stored - 0.001 < average_bits(chosen, "weights") <= stored
