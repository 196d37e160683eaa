"""A few of the changed checkpoints that `python -m tests.fuzz.checkpoints` tries by the thousand."""

from tests.fuzz.checkpoints import try_checkpoints

COUNT = 120


def test_a_changed_checkpoint_is_refused_in_a_line_or_works(tmp_path):
    counts, wrong = try_checkpoints(tmp_path, range(COUNT))
    assert not wrong
    # Both happen, so neither is what everything comes to.
    assert min(counts["works"], counts["refused"]) > COUNT // 10
