from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from diffquant.evals.batching import split

LENGTHS = st.lists(st.integers(1, 60), max_size=9).map(lambda lengths: sorted(lengths, reverse=True))


def cost(runs, lengths, pass_cost):
    return sum(len(run) * lengths[run.start] + pass_cost for run in runs)


@given(LENGTHS, st.integers(1, 300), st.integers(0, 50))
def test_no_other_cut_within_the_budget_costs_less(lengths, budget, pass_cost):
    runs = split(lengths, budget, pass_cost)
    assert [index for run in runs for index in run] == list(range(len(lengths)))
    assert all(len(run) == 1 or len(run) * lengths[run.start] <= budget for run in runs)
    others = (
        [range(a, b) for a, b in zip((0, *cuts), (*cuts, len(lengths)), strict=True)]
        for count in range(len(lengths))
        for cuts in combinations(range(1, len(lengths)), count)
    )
    allowed = [c for c in others if all(len(run) == 1 or len(run) * lengths[run.start] <= budget for run in c)]
    assert cost(runs, lengths, pass_cost) == min((cost(c, lengths, pass_cost) for c in allowed), default=0)
