"""Arguments that only Python can give."""

import math

import pytest
import torch

import diffquant
from diffquant.errors import UsageError
from diffquant.verbs.kinds import parse_numbers
from tests.support.tables import in_one_test


def test_a_model_in_memory_is_refused_in_words(tmp_path):
    with pytest.raises(UsageError, match="from disk, not a Linear in memory; write a folder"):
        diffquant.quantize(torch.nn.Linear(8, 8), tmp_path / "out", {"weights": "8:row"})
    assert not (tmp_path / "out").exists()


def test_a_parameter_that_there_is_not_hears_of_the_nearest(tmp_path):
    with pytest.raises(UsageError, match="no task has an option granularity; did you mean 'granularities'"):
        diffquant.sweep("model", tmp_path / "out", granularity="row")


@in_one_test(
    ("verb", "arguments", "message"),
    [
        ("run", {"prompt": "x", "temperature": math.nan}, "temperature must be 0 or more, got nan"),
        ("run", {"prompt": "x", "threads": 100_000}, "threads must be 1024 or less, got 100000"),
        ("verify", {"model": "model", "tolerance": math.nan}, "tolerance must be 0 or more, got nan"),
        ("verify", {"model": "model", "tolerance": -1.0}, "tolerance must be 0 or more, got -1"),
    ],
)
def test_a_number_beyond_its_bounds_is_refused_and_so_is_one_that_is_none(verb, arguments, message):
    with pytest.raises(UsageError, match=message):
        getattr(diffquant, verb)("folder", **arguments)


@in_one_test("given", [4, "4", [4]])
def test_one_width_is_given_as_a_number_too(given):
    assert parse_numbers("bits", given) == (4,)
