"""A sample of the kills that `python -m tests.fuzz.kills` makes, the last moments of each verb among them."""

import sys

import pytest

from tests.fuzz.kills import VERBS, try_kills

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")


@pytest.mark.parametrize("verb", VERBS, ids=[verb.name for verb in VERBS])
def test_a_run_that_was_killed_before_any_operation_on_a_file_is_made_good_by_the_next(verb, tmp_path):
    outcome = try_kills(
        verb, tmp_path, lambda count: sorted({*range(3, count, 1 + count // 3), *range(count - 3, count + 1)})
    )
    assert outcome.killed >= min(5, outcome.operations - 1)
    assert not outcome.problems
