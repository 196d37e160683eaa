"""The report of a folder of searches, and the chart of their candidates by size and KL."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from diffquant.calib.search.outputs import (
    check_same_search,
    check_search_output,
    compare_with_uniform,
    draw_pareto,
    interpolate_uniform_kl,
    search_report,
)
from diffquant.calib.search.result import group_searches, read_search, read_searches
from diffquant.errors import OutputExistsError
from diffquant.reports.page import Section, render_page
from diffquant.reports.plots import new_figure
from diffquant.reports.tables import Table
from tests.support.earlier_results import write_recorded


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "searches"
    for name in ("4.5", "5.5"):
        write_recorded(f"smollm2-search/search-{name}-bits.json", folder / f"search-{name}-bits.json")
    write_recorded("smollm2-search-cache/search-4.5-bits.json", folder / "search-4.5-bits-of-cache.json")
    return folder


def test_searches_of_other_targets_or_models_have_a_chart_of_their_own(folder):
    assert [[result.budget for result in group] for group in group_searches(read_searches(folder))] == [
        ["4.5 bits"],
        ["4.5 bits", "5.5 bits"],
    ]
    earlier = read_search(folder / "search-4.5-bits.json")
    # Of another model in a folder that is called alike.
    namesake = replace(earlier, settings=earlier.settings | {"model": "0" * 64})
    assert group_searches([earlier, namesake]) == [[earlier], [namesake]]


def test_a_width_that_changes_nothing_is_drawn_and_not_interpolated(folder):
    """A ternary model's weights lie on the grid of any width."""
    found = read_search(folder / "search-4.5-bits.json")
    exact = replace(found, candidates=[replace(candidate, kl=0.0) for candidate in found.candidates])
    axis = new_figure(4, 4).subplots()
    draw_pareto([exact], axis)
    assert axis.get_yscale() == "linear"
    assert interpolate_uniform_kl(found) is not None
    assert interpolate_uniform_kl(exact) is None
    assert "KL 0 on held-out text, against 0 of the same widths" in compare_with_uniform(exact)


def test_the_report_says_each_verdict_and_lists_every_unit_the_costliest_first(folder):
    report = search_report(folder)
    assert report.name == "searches"
    assert len(report.headline) == 3
    assert "budget 5.5 bits: KL 0.02956 on held-out text" in report.headline[-1]
    folds = [block for section in report.sections for block in section.blocks if isinstance(block, Section)]
    tables = [block for fold in folds for block in fold.blocks if isinstance(block, Table)]
    assert [len(table.rows) for table in tables] == [90, 210, 210]
    assert tables[1].rows[0][0] == "model.layers.11.mlp.down_proj"
    text = render_page(report)
    assert text.count("<svg") == 2 + 3
    assert 'href="./search-4.5-bits.json"' in text


def test_a_search_replaces_pages_of_earlier_searches_alone(folder, tmp_path):
    for name in ("pareto.png", "search.html"):
        (tmp_path / name).write_text("a user's own")
    with pytest.raises(OutputExistsError, match=r"pareto\.png.*search\.html"):
        check_search_output("4.5 bits", tmp_path)
    shutil.copy(folder / "search-5.5-bits.json", tmp_path)
    check_search_output("4.5 bits", tmp_path)


def test_a_search_of_another_model_or_of_other_targets_does_not_replace_a_recipe(folder):
    earlier = read_search(folder / "search-4.5-bits.json")
    same = SimpleNamespace(path=Path(earlier.model), fingerprint=earlier.fingerprint)
    check_same_search("4.5 bits", same, ("weights",), folder)
    moved = SimpleNamespace(path=Path("elsewhere"), fingerprint=earlier.fingerprint)
    check_same_search("4.5 bits", moved, ("weights",), folder)
    another = SimpleNamespace(path=Path("other"), fingerprint="0" * 64)
    check_same_search("6.5 bits", another, ("k", "v"), folder)
    namesake = SimpleNamespace(path=Path(earlier.model), fingerprint="0" * 64)
    for source, targets, named in (
        (another, ("weights",), r"other \(weights\)"),
        (namesake, ("weights",), rf"another {earlier.model} \(weights\)"),
        (same, ("k", "weights"), rf"{earlier.model} \(k, weights\)"),
    ):
        with pytest.raises(
            OutputExistsError,
            match=rf"5-bits\.json is a search of {earlier.model} \(weights\); .* of {named} would replace it; choose",
        ):
            check_same_search("4.5 bits", source, targets, folder)
