"""Each verb writes and prints what it did when its golden was kept."""

import json

import pytest

from tests.golden.cases import CASES
from tests.golden.running import EXPECTED, expected, help_texts, run
from tests.golden.views import differences


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_verb_writes_what_it_wrote(case, tmp_path):
    kept = json.loads(expected(case).read_text())
    # Through JSON, as the golden went.
    now = json.loads(json.dumps(run(case, tmp_path)))
    assert not differences(kept, now, case.is_exact)


def test_help_says_what_it_said():
    kept = {file.stem: file.read_text() for file in (EXPECTED / "help").iterdir()}
    assert help_texts() == kept


def test_every_golden_has_its_case():
    assert {file.stem for file in EXPECTED.glob("*.json")} == {case.name for case in CASES}


def test_a_change_of_a_tensor_a_number_or_a_line_is_seen():
    old = {"files": {"a": {"x": "uint8[2] 00", "y": 1.0}, "b": ["one", "two"]}}
    new = {"files": {"a": {"x": "uint8[2] 01", "y": 1.1}, "b": ["one", "too"]}}
    assert len(differences(old, new, is_exact=True)) == 3
    assert [line.split(":")[0] for line in differences(old, new, is_exact=False)] == [
        "/files/a/x",
        "/files/a/y",
        "/files/b[1]",
    ]
