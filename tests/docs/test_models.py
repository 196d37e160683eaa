"""The table of evidence about models: every tick leads to a test that is there, and every format has a row."""

import ast
import re
from pathlib import Path

import pytest

from diffquant.model.adapters import READERS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
HEADS = ("opens", "float64", "stock", "real weights", "exported", "served", "on a GPU")
TICK = re.compile(r'\[[^\[\]]+\]\(\.\./(tests/[\w/]+\.py) "(test_\w+)"\)')


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


@pytest.mark.parametrize("model", rows())
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


def test_what_a_column_tells_is_where_its_tests_are():
    """A tick for serving is a test on vLLM, and one for a GPU is of those that a GPU runs."""
    for cells in rows().values():
        for head, folder in (("served", "tests/serving/"), ("on a GPU", "tests/gpu/")):
            tick = TICK.fullmatch(cells[HEADS.index(head)])
            assert tick is None or tick[1].startswith(folder)


def test_every_format_that_is_read_has_a_row():
    text = PAGE.read_text(encoding="utf-8")
    assert not [name for name in READERS if f"`{name}`" not in text and f"`{name.capitalize()}`" not in text]
