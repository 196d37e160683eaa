"""A few of the changed checkpoints that `python -m tests.fuzz.checkpoints` tries by the thousand."""

from collections import Counter

import pytest

from tests.fuzz.checkpoints import try_checkpoints
from tests.support.thorough import sampled

COUNT = 40


@pytest.mark.parametrize("first", sampled(range(0, 3 * COUNT, COUNT), 3))
def test_a_changed_checkpoint_is_refused_in_a_line_or_works(tmp_path, first):
    counts, wrong = try_checkpoints(tmp_path, range(first, first + COUNT))
    assert not wrong
    # Both happen, so neither is what everything comes to.
    together = sum(counts.values(), Counter())
    assert min(together["works"], together["refused"]) > COUNT // 10
