"""A sample of the kills that `python -m tests.fuzz.kills` makes, the last moments of each verb among them."""

import sys

import pytest

from tests.fuzz.kills import VERBS, try_kills
from tests.support.thorough import thorough

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")

# Verbs that run a model take seconds for each kill.
QUICK = VERBS[:4]
SLOW = [pytest.param(verb, marks=thorough) for verb in VERBS[4:]]


def some_and_the_last_four(operations):
    """Operations to be killed before, counted from 1: every third of the way, and the end, where the output appears."""
    return sorted({*range(3, operations, 1 + operations // 3), *range(max(1, operations - 3), operations + 1)})


@pytest.mark.parametrize("verb", [*QUICK, *SLOW], ids=[verb.name for verb in VERBS])
def test_a_run_that_was_killed_before_any_operation_on_a_file_is_made_good_by_the_next(verb, tmp_path):
    outcome = try_kills(verb, tmp_path, some_and_the_last_four)
    assert not outcome.problems
    assert outcome.moments == tuple(some_and_the_last_four(outcome.operations))
