"""What tables and pictures of searches show, read from the figures."""

import numpy as np
from matplotlib.colors import to_rgba

from diffquant.calib.search.outputs import draw_pareto, heat_figure, search_table
from diffquant.calib.search.result import Candidate, Measurement, SearchResult
from diffquant.recipe import Recipe
from diffquant.reports.plots import new_figure

KINDS = ("self_attn.q_proj", "mlp.up_proj")
# KL of each unit at 4 bits, by kind and layer: the larger, the lighter its cell.
COSTS = np.array([[0.001, 0.01, 0.1], [1.0, 0.0001, 0.02]])


def search(costs=COSTS, budget="5 bits"):
    measurements = [
        Measurement(
            name=f"model.layers.{layer}.{kind}",
            target="weights",
            layer=layer,
            kind=kind,
            elements=64,
            kl={8: float(cost) / 100, 6: float(cost) / 10, 4: float(cost)},
            chosen=6 if cost > 0.05 else 4,
        )
        for kind, row in zip(KINDS, costs, strict=True)
        for layer, cost in enumerate(row)
    ]
    candidates = [
        Candidate(name, {"weights": bits}, size, None, kl, 20.0)
        for name, bits, size, kl in (
            ("searched", 5, 103_400_000, 0.02),
            ("spread evenly", 5, 99_400_000, 0.03),
            ("uniform 4", 4.5, 9_100_000, 0.05),
        )
    ]
    return SearchResult("a model", budget, 19.0, candidates, measurements, Recipe(), {})


def test_a_heat_map_shows_what_the_narrowest_width_alone_costs_and_the_width_given():
    axis = heat_figure(search()).axes[0]
    (image,) = axis.images
    np.testing.assert_allclose(image.get_array(), COSTS)
    said = {(int(text.get_position()[1]), int(text.get_position()[0])): text for text in axis.texts}
    assert {place: text.get_text() for place, text in said.items()} == {
        (kind, layer): "6" if COSTS[kind, layer] > 0.05 else "4" for kind in range(2) for layer in range(3)
    }
    assert {place for place, text in said.items() if text.get_fontweight() == "bold"} == {(0, 2), (1, 0)}
    # Dark letters over light cells: a cell's luminance and its letter's lie on two sides of the middle.
    for (kind, layer), text in said.items():
        cell = np.dot(image.to_rgba(image.get_array())[kind, layer, :3], (0.299, 0.587, 0.114))
        letter = np.dot(to_rgba(text.get_color())[:3], (0.299, 0.587, 0.114))
        assert abs(cell - letter) > 0.35, (cell, letter)


def test_units_that_cost_the_same_can_be_drawn():
    figure = heat_figure(search(np.full((2, 3), 0.25)))
    (image,) = figure.axes[0].images
    assert image.norm.vmin == 0.25 < image.norm.vmax
    figure.canvas.draw()


def test_the_families_of_candidates_have_a_legend_and_all_points_are_in_sight():
    axis = new_figure(4, 4).subplots()
    draw_pareto([search(), search(budget="6 bits")], axis)
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["uniform", "spread evenly", "searched"]
    names = {text.get_text() for text in axis.texts}
    # Uniform widths that two budgets were compared with are one point.
    assert names == {"uniform 4"} | {f"{name}, {n} bits" for name in ("searched", "spread evenly") for n in (5, 6)}
    low, high = axis.get_ylim()
    assert low < 0.02
    assert high > 0.05


def test_sizes_stand_below_each_other_at_the_right_of_their_column():
    head, _, _, *lines = search_table(search()).splitlines()[:6]
    assert {line.index(" MB") + 3 for line in lines} == {head.index("checkpoint") + len("checkpoint")}
