"""The faults that mutation testing plants."""

import ast
import json
import subprocess
import sys

import pytest
import yaml

from tests.mutants.__main__ import REASONS, reasons_for_surviving
from tests.mutants.groups import GROUPS
from tests.mutants.planting import mutants_of, planted
from tests.mutants.reach import Reach, measure
from tests.mutants.trial import KILLED, in_a_process, outcome

SOURCE = '''"""A docstring of 3."""

from math import floor

__all__ = ["inside"]


@decorated(1)
def inside(x: "1 < 2", low=0) -> "2 > 1":
    """Whether x is at least 1."""
    if low <= x and not floor(x) == 5:
        return max(x, 2.5)
    raise ValueError(f"{x + 1} is no 4")
'''

# A module and its tests, which import it late.
PARTS = """FACTOR = 2


def doubled(x):
    return FACTOR * x


def halved(x):
    return x / 2
"""
TESTS_OF_PARTS = """import pytest

@pytest.fixture(scope="module")
def four():
    from diffquant_toy.room.parts import doubled
    return doubled(2)

def test_a_number(four):
    assert isinstance(four, int | float)

def test_four(four):
    assert four == 4

def test_half():
    from diffquant_toy.room.parts import halved
    assert halved(4) == 2

def test_nothing_of_it():
    assert True
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    return str(path)


def test_faults_are_of_code_and_not_of_texts_types_and_decorators(file):
    assert sorted(mutant.change for mutant in mutants_of(file)) == sorted(
        [
            "0 -> 1",
            "0 -> -1",
            "if low <= x and (not floor(x) == 5): return max(x, 2.5) -> "
            "if not (low <= x and (not floor(x) == 5)): return max(x, 2.5)",
            "low <= x and (not floor(x) == 5) -> low <= x or not floor(x) == 5",
            "low <= x -> low < x",
            "low <= x -> low > x",
            "not floor(x) == 5 -> floor(x) == 5",
            "floor(x) == 5 -> floor(x) != 5",
            "5 -> 6",
            "5 -> 4",
            "return max(x, 2.5) -> return None",
            "max(x, 2.5) -> min(x, 2.5)",
            "2.5 -> 5.0",
            "raise ValueError(f'{x + 1} is no 4') -> pass",
        ]
    )


def test_each_fault_is_planted_alone(file):
    original = ast.unparse(ast.parse(SOURCE))
    trees = [ast.unparse(planted(mutant)) for mutant in mutants_of(file)]
    assert len({original, *trees}) == 1 + len(trees)
    for tree in trees:
        changed = [
            line for line, before in zip(tree.splitlines(), original.splitlines(), strict=True) if line != before
        ]
        assert len(changed) == 1


def test_quick_tests_of_every_function_come_first_and_the_budget_ends_them():
    seconds = {"t.py::slow": 9.0, "t.py::a[1]": 0.1, "t.py::a[2]": 0.2, "t.py::b": 0.3, "t.py::elsewhere": 0.1}
    lines = {test: {"f.py": [8] if test == "t.py::elsewhere" else [3, 4]} for test in seconds}
    reach = Reach(lines, seconds, [], "")
    assert reach.of("f.py", (4, 5), 0.7) == ["t.py::a[1]", "t.py::b"]
    assert reach.of("f.py", (4, 5), 99) == ["t.py::a[1]", "t.py::b", "t.py::slow", "t.py::a[2]"]
    # One test at least, however long it takes.
    assert reach.of("f.py", (8, 8), 0.0) == ["t.py::elsewhere"]
    assert reach.of("g.py", (4, 5), 99) == []


def test_every_reason_is_of_a_fault_that_can_be_planted():
    files = {file for group in GROUPS.values() for file in group.files}
    faults = {(file, mutant.code, mutant.change) for file in files for mutant in mutants_of(file)}
    assert reasons_for_surviving(yaml.safe_load(REASONS.read_text())).keys() <= faults


@pytest.fixture
def room(tmp_path, monkeypatch):
    """A folder with a package that is reached through a link, as the rooms at the top are, and its tests."""
    (tmp_path / "room").mkdir()
    (tmp_path / "diffquant_toy").mkdir()
    (tmp_path / "diffquant_toy/room").symlink_to("../room")
    (tmp_path / "room/parts.py").write_text(PARTS)
    (tmp_path / "test_parts.py").write_text(TESTS_OF_PARTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return "diffquant_toy/room/parts.py"


def test_faults_in_a_linked_room_meet_the_tests_that_reach_them_by_an_import_or_a_shared_fixture_too(room, tmp_path):
    file = tmp_path / "reach.json"
    assert in_a_process(lambda: measure([room], ("test_parts.py",), file), 60) == 0
    reach = Reach(**json.loads(file.read_text()))
    found = {line: {test.partition("::test_")[2] for test in reach.of(room, (line, line), 99)} for line in (1, 5, 9)}
    assert found == {1: {"a_number", "four", "half"}, 5: {"a_number", "four"}, 9: {"half"}}
    assert {outcome(mutant, reach.of(room, mutant.lines, 99), 60) for mutant in mutants_of(room)} == {KILLED}


def test_a_module_that_was_imported_already_meets_no_fault():
    import diffquant.verbs.notes  # noqa: F401

    mutant = mutants_of("diffquant/verbs/notes.py")[0]
    with pytest.raises(ValueError, match=r"diffquant\.verbs\.notes was imported before a fault was planted in it"):
        outcome(mutant, ["tests/test_mutants.py"], 1)


def test_the_program_imports_nothing_that_it_plants_faults_in():
    code = "import sys, tests.mutants.__main__; print(*(name for name in sys.modules if name.startswith('diffquant')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.split()
