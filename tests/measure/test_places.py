"""Needle accuracy by place: what differs is drawn, and what is alike everywhere is said."""

from pathlib import Path

import pytest

from diffquant.errors import UsageError
from diffquant.measure.cells import Cell, SweepPoint
from diffquant.measure.results import TaskResult
from diffquant.measure.tasks.needle import plot_accuracy_grid
from diffquant.recipe import Recipe


def cell(model, accuracies):
    places = [{"depth": n / 4, "length": 256, "accuracy": accuracy} for n, accuracy in enumerate(accuracies)]
    result = TaskResult(metric="retrieved", details={"by_place": places})
    return model, Cell(SweepPoint(Path(model), "", 16, "", Recipe(), None), "needle:1:1", result, None)


def test_a_line_stands_for_what_is_even_and_nothing_is_drawn_where_all_is(tmp_path):
    plot_accuracy_grid([cell("even", [1.0, 1.0]), cell("b", [1.0, 0.5])], tmp_path / "places.svg")
    assert "even, needle:1:1: 100 % everywhere" in (tmp_path / "places.svg").read_text()
    with pytest.raises(UsageError, match="no needle cell at 16 bits has an accuracy that differs by depth or length"):
        plot_accuracy_grid([cell("a", [1.0, 1.0])], tmp_path / "nothing.svg")
    assert not (tmp_path / "nothing.svg").exists()
