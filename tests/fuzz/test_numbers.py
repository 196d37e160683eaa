"""A few of the weights that `python -m tests.fuzz.numbers` tries by the thousand."""

import torch

from diffquant.recipe.numbers import absmax
from diffquant.recipe.scheme import Scheme
from tests.fuzz.numbers import DTYPES, MAKES, problem_with, try_numbers, weight_of

COUNT = 24


def test_a_weight_is_off_by_half_a_step_and_its_scales_rounding_at_most(tmp_path):
    counts, wrong = try_numbers(tmp_path, range(COUNT))
    assert not wrong
    assert len(counts) == len(DTYPES)


def test_scales_that_are_rounded_to_nearest_where_few_digits_are_left_are_noticed(monkeypatch):
    monkeypatch.setattr(absmax, "to_storable_scale", lambda scale, _top, dtype: scale.to(dtype).clamp(min=1e-45))
    weights = [weight_of(seed, torch.float16) for seed in range(len(MAKES) * 4)]
    assert any(problem_with(weight, Scheme.parse("8:row")) for weight in weights)
