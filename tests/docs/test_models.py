"""The table of evidence about models: every tick leads to a test that is there, and every format has a row."""

import ast
import re
from importlib import import_module
from pathlib import Path

from diffquant.model.adapters import READERS
from tests.checkpoints.test_sources import SOURCES
from tests.support.tables import in_one_test

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
HEADS = ("opens", "float64", "stock", "real weights", "exported", "served", "on a GPU")
TICK = re.compile(r'\[[^\[\]]+\]\(\.\./(tests/[\w/]+\.py) "(test_\w+)(?:\[([\w-]+)\])?"\)')


def rows() -> dict[str, list[str]]:
    """Cells of each model by its name."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| model | opens |"))
    assert [cell.strip() for cell in lines[start].strip("|").split("|")] == ["model", *HEADS]
    table: dict[str, list[str]] = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return table
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        table[name] = cells
    return table


@in_one_test("model", rows())
def test_each_tick_leads_to_a_test_that_is_there(model):
    cells = rows()[model]
    assert len(cells) == len(HEADS)
    for head, cell in zip(HEADS, cells, strict=True):
        if cell == "–":
            continue
        tick = TICK.fullmatch(cell)
        assert tick, f"{head}: {cell!r} is neither a dash nor a link to a test"
        tests = ast.parse((ROOT / tick[1]).read_text(encoding="utf-8")).body
        assert tick[2] in {each.name for each in tests if isinstance(each, ast.FunctionDef)}, f"{head}: {cell}"


def cases_of(file: str, test: str) -> set[object]:
    """The values that a test is parametrized by."""
    module = import_module(file.removesuffix(".py").replace("/", "."))
    marks = [mark for mark in getattr(module, test).pytestmark if mark.name == "parametrize"]
    cases = [getattr(case, "values", case) for mark in marks for case in mark.args[1]]
    return {case[0] if isinstance(case, tuple) else case for case in cases}


def test_a_tick_of_a_test_about_several_models_names_the_case_that_is_the_models_own():
    ticks = [(model, tick) for model, cells in rows().items() for cell in cells if (tick := TICK.fullmatch(cell))]
    models: dict[tuple[str, str], set[str]] = {}
    for model, tick in ticks:
        models.setdefault((tick[1], tick[2]), set()).add(model)
    shared = {test for test, of in models.items() if len(of) > 1}
    assert len(shared) == 3
    own: dict[str, set[str]] = {}
    for model, tick in ticks:
        assert (tick[3] is not None) == ((tick[1], tick[2]) in shared), model
        if tick[3] is not None:
            assert tick[3] in cases_of(tick[1], tick[2]), f"{model}: {tick[2]} has no case {tick[3]}"
            own.setdefault(model, set()).add(tick[3])
    # One case a model, and no model another's.
    assert all(len(cases) == 1 for cases in own.values())
    assert len(set().union(*own.values())) == len(own)


def test_an_export_is_ticked_where_the_case_is_exported():
    cells = [of[HEADS.index("exported")] for of in rows().values()]
    exported = {tick[3] for cell in cells if (tick := TICK.fullmatch(cell)) and tick[3]}
    assert exported == set(SOURCES)


def test_what_a_column_tells_is_where_its_tests_are():
    """A tick for serving is a test on vLLM, and one for a GPU is of those that a GPU runs."""
    for cells in rows().values():
        for head, folder in (("served", "tests/vllm/"), ("on a GPU", "tests/gpu/")):
            tick = TICK.fullmatch(cells[HEADS.index(head)])
            assert tick is None or tick[1].startswith(folder)


def test_every_format_that_is_read_has_a_row():
    text = PAGE.read_text(encoding="utf-8")
    assert not [name for name in READERS if f"`{name}`" not in text and f"`{name.capitalize()}`" not in text]
