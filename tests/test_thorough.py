"""Eighths of the thorough tests: every test is in one of them, and a day's can be run again."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support import thorough
from tests.support.thorough import EIGHTHS, VARIABLE, eighth_of, eighth_of_today

ROOT = Path(__file__).parents[1]
FILES = ("tests/test_pocket.py", "tests/fuzz", "tests/kernels/test_decode.py", "tests/kernels/test_prefill.py")
# Collects once, and asks the hook for every eighth of what there is.
COLLECT = """
import json, os, sys
import pytest
from tests.support import thorough

found = {}

class Ask:
    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, config, items):
        everything, chosen = list(items), os.environ[thorough.VARIABLE]
        found["all"] = [each.nodeid for each in everything if each.get_closest_marker("thorough")]
        found["others"] = [each.nodeid for each in everything if not each.get_closest_marker("thorough")]
        for number in range(thorough.EIGHTHS):
            os.environ[thorough.VARIABLE] = str(number)
            left = list(everything)
            thorough.pytest_collection_modifyitems(config, left)
            found[str(number)] = [each.nodeid for each in left]
        os.environ[thorough.VARIABLE] = chosen
        yield
        found["ran"] = [each.nodeid for each in items]

pytest.main([*sys.argv[2:], "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "thorough"], [Ask()])
open(sys.argv[1], "w").write(json.dumps(found))
"""


@pytest.fixture(scope="module")
def collection(tmp_path_factory):
    """What pytest finds, and what it says, on a day."""
    file = tmp_path_factory.mktemp("collected") / "found.json"
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name} | {VARIABLE: "today"}
    command = [sys.executable, "-c", COLLECT, file, *FILES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return json.loads(file.read_text()), done.stdout


class Case:
    """As much of a collected test as tells its eighth."""

    def __init__(self, nodeid, is_thorough=True):
        self.nodeid, self.is_thorough = nodeid, is_thorough

    def get_closest_marker(self, name):
        return self.is_thorough and name == "thorough"


def test_every_thorough_test_is_in_one_eighth_and_the_others_stay(collection):
    found, _ = collection
    assert len(found["all"]) > 60
    eighths = [[test for test in found[str(number)] if test in set(found["all"])] for number in range(EIGHTHS)]
    assert sorted(test for eighth in eighths for test in eighth) == sorted(found["all"])
    assert max(map(len, eighths)) <= 1.6 * len(found["all"]) / EIGHTHS
    assert found["others"]
    for number in range(EIGHTHS):
        assert set(found["others"]) <= set(found[str(number)])


def test_every_case_is_in_one_eighth_and_stays_there_when_others_are_added():
    cases = [Case(f"tests/a.py::test_{name}[{number}]") for name in "pqrstuv" for number in range(24)]
    before = eighth_of(cases)
    assert before.keys() == set(cases)
    assert Counter(before.values()) == dict.fromkeys(range(EIGHTHS), 21)
    more = [Case("tests/a.py::test_first"), Case("tests/a.py::test_p[x]", is_thorough=False), *cases]
    after = eighth_of([*more, Case("tests/a.py::test_v[24]")])
    assert {case: after[case] for case in cases} == before
    assert len(after) == len(cases) + 2


def test_todays_eighth_is_run_and_said_with_how_to_run_it_again(collection):
    found, said = collection
    # Midnight may have passed since.
    number = next(each for each in (eighth_of_today(), (eighth_of_today() - 1) % EIGHTHS) if f"eighth {each};" in said)
    assert f"thorough tests of eighth {number}; {VARIABLE}={number} runs the same on another day" in said
    assert found["ran"] == [test for test in found[str(number)] if test in set(found["all"])]


def test_eight_days_have_eight_eighths(monkeypatch):
    noon = 20_000.5
    days = [noon + day for day in range(2 * EIGHTHS)]
    found = []
    for day in days:
        monkeypatch.setattr(time, "time", lambda day=day: day * 86400)
        found.append(eighth_of_today())
    assert found == [(20_000 + day) % EIGHTHS for day in range(2 * EIGHTHS)]
    assert set(found[:EIGHTHS]) == set(range(EIGHTHS))


@pytest.mark.parametrize("wrong", ["8", "-1", "third", "1.0"])
def test_an_eighth_that_is_none_is_refused(wrong, monkeypatch):
    class Config:
        pluginmanager = None

    class Session:
        config = Config()

    monkeypatch.setenv(VARIABLE, wrong)
    with pytest.raises(pytest.UsageError, match=f"{VARIABLE} must be today or a number from 0 to 7, got {wrong}"):
        thorough.pytest_sessionstart(Session())
