from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from diffquant.measure.scoring import split_into_passes

LENGTHS = st.lists(st.integers(1, 60), max_size=9).map(lambda lengths: sorted(lengths, reverse=True))


def cost(runs, lengths, pass_cost):
    return sum(len(run) * lengths[run.start] + pass_cost for run in runs)


@given(LENGTHS, st.integers(1, 300), st.integers(0, 40), st.integers(0, 50))
def test_no_other_cut_within_the_budget_costs_less(lengths, budget, cached, pass_cost):
    def fits(run):
        return len(run) == 1 or len(run) * (lengths[run.start] + cached) <= budget

    runs = split_into_passes(lengths, budget, cached, pass_cost)
    assert [index for run in runs for index in run] == list(range(len(lengths)))
    assert all(map(fits, runs))
    others = (
        [range(a, b) for a, b in zip((0, *cuts), (*cuts, len(lengths)), strict=True)]
        for count in range(len(lengths))
        for cuts in combinations(range(1, len(lengths)), count)
    )
    allowed = [cut for cut in others if all(map(fits, cut))]
    assert cost(runs, lengths, pass_cost) == min((cost(c, lengths, pass_cost) for c in allowed), default=0)
