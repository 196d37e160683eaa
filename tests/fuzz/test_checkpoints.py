"""A few of the changed checkpoints that `python -m tests.fuzz.checkpoints` tries by the thousand."""

from collections import Counter

from tests.fuzz.checkpoints import try_checkpoints

COUNT = 120


def test_a_changed_checkpoint_is_refused_in_a_line_or_works(tmp_path):
    counts, wrong = try_checkpoints(tmp_path, range(COUNT))
    assert not wrong
    # Both happen, so neither is what everything comes to.
    together = sum(counts.values(), Counter())
    assert min(together["works"], together["refused"]) > COUNT // 10
