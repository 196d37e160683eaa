"""A few of the changed inputs that `python -m tests.fuzz.inputs` tries by the thousand."""

import sys

import pytest

from tests.fuzz.inputs import kinds, try_inputs, verdict_on

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="an alarm ends what hangs")

COUNT = 240


def test_sound_inputs_of_every_kind_are_read(tmp_path):
    for name, kind in kinds(tmp_path).items():
        assert [verdict_on(kind, content) for content in kind.sound] == ["works"] * len(kind.sound), name


def test_a_changed_input_is_refused_in_a_line_or_says_what_can_be_true(tmp_path):
    counts, wrong = try_inputs(tmp_path, range(COUNT))
    assert not wrong
    # Of each kind some are refused, so the changes reach what is checked.
    assert all(verdicts["refused"] > COUNT // 40 for verdicts in counts.values())
