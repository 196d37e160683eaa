"""Shares of the thorough tests, the cases that `make test` runs, and tables in one test."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.slow import slow_tests
from tests.support.tables import in_one_test
from tests.support.thorough import SHARES, pick_each_choice, share_of

ROOT = Path(__file__).parents[1]


class Case:
    """As much of a collected test as tells its share."""

    def __init__(self, nodeid, is_thorough=True):
        self.nodeid, self.is_thorough = nodeid, is_thorough

    def get_closest_marker(self, name):
        return self.is_thorough and name == "thorough"


def test_every_case_is_in_one_share_and_stays_there_when_others_are_added():
    cases = [Case(f"tests/a.py::test_{name}[{number}]") for name in "pqrstuv" for number in range(24)]
    before = share_of(cases)
    assert before.keys() == set(cases)
    assert Counter(before.values()) == dict.fromkeys(range(SHARES), 14)
    more = [Case("tests/a.py::test_first"), Case("tests/a.py::test_p[x]", is_thorough=False), *cases]
    after = share_of([*more, Case("tests/a.py::test_v[24]")])
    assert {case: after[case] for case in cases} == before
    assert len(after) == len(cases) + 2


class Parametrized(Case):
    """A case with parameters, as pytest collects it."""

    def __init__(self, nodeid, **params):
        super().__init__(nodeid, is_thorough=False)
        self.callspec = SimpleNamespace(params=params)


def test_cases_that_make_test_runs_have_every_value_of_every_parameter():
    cases = [Parametrized(f"t[{a}-{b}-{c}]", a=a, b=b, c=c) for a in range(4) for b in "xyz" for c in (None, [1])]
    picked = pick_each_choice(cases)
    assert cases[0] in picked
    assert len(picked) == 4
    assert pick_each_choice(cases[:1]) == {cases[0]}
    for name in "abc":
        assert {repr(case.callspec.params[name]) for case in picked} == {repr(c.callspec.params[name]) for c in cases}


def test_a_table_runs_every_case_with_a_folder_of_its_own_and_names_the_one_that_fails(tmp_path):
    seen = []

    @in_one_test("a, b", [(1, "x"), (2, "y"), (3, "z")])
    def table(tmp_path, a, b):
        seen.append((a, b, tmp_path.name))
        assert a < 3

    with pytest.raises(AssertionError) as caught:
        table(tmp_path=tmp_path)
    assert seen == [(1, "x", "0"), (2, "y", "1"), (3, "z", "2")]
    assert caught.value.__notes__ == ["in case 2: {'a': 3, 'b': 'z'}"]


def test_every_slow_test_is_there():
    missing = []
    for name in slow_tests():
        file, _, test = name.partition("::")
        path = ROOT / file
        if not path.is_file() or f"def {test}(" not in path.read_text(encoding="utf-8"):
            missing.append(name)
    assert not missing, "python -m tests.slow writes the list anew"
