"""Needle accuracy by place: what differs is drawn, and what is alike everywhere is said."""

import pytest

from diffquant.errors import UsageError
from diffquant.evals.plots.places import place_panels, plot_places
from diffquant.evals.task import PlottedCell
from diffquant.evals.task_result import TaskResult


def cell(model, accuracies):
    places = [{"depth": n / 4, "length": 256, "accuracy": accuracy} for n, accuracy in enumerate(accuracies)]
    result = TaskResult(metric="retrieved", details={"by_place": places})
    return PlottedCell(model, "", "16", True, "needle:1:1", result)


def test_a_model_that_is_alike_everywhere_is_even():
    even, uneven = place_panels([cell("a", [1.0, 1.0]), cell("b", [1.0, 0.5])])
    assert even.is_even
    assert not uneven.is_even


def test_a_line_stands_for_what_is_even_and_nothing_is_drawn_where_all_is(tmp_path):
    plot_places([cell("a", [1.0, 1.0]), cell("b", [1.0, 0.5])], tmp_path / "places.svg")
    assert (tmp_path / "places.svg").stat().st_size > 1000
    with pytest.raises(UsageError, match="no needle cell at 16 bits has places that differ"):
        plot_places([cell("a", [1.0, 1.0])], tmp_path / "nothing.svg")
    assert not (tmp_path / "nothing.svg").exists()
