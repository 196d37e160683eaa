"""A plot of needle accuracy by depth and length at 16 bits, one panel for each model and task whose places differ.

Source: the presentation follows figure 5 of arXiv 2410.05258.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diffquant.errors import UsageError
from diffquant.evals.task import PlottedCell
from diffquant.report.plots import literal, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class PlacePanel:
    """One model on one task: accuracy in percent by depth (rows) and length (columns)."""

    model: str
    task: str
    depths: tuple[float, ...]
    lengths: tuple[int, ...]
    accuracy: tuple[tuple[float, ...], ...]

    @property
    def is_even(self) -> bool:
        """Whether every place has the same accuracy."""
        return len({value for row in self.accuracy for value in row if value == value}) < 2


def place_panels(cells: Sequence[PlottedCell]) -> list[PlacePanel]:
    """The panels: one for every cell at 16 bits."""
    return [_make_panel(cell.model, cell.task, cell.result.details["by_place"]) for cell in cells if cell.is_baseline]


def plot_places(cells: Sequence[PlottedCell], path: Path) -> None:
    """Draw needle accuracy into a file, whose suffix says the format. Where all places are alike, a line says it.

    Raises:
        UsageError: no needle cell was measured at 16 bits, or no two places of one differ.
    """
    panels = place_panels(cells)
    differing = [panel for panel in panels if not panel.is_even]
    if not differing:
        raise UsageError("nothing to plot: no needle cell at 16 bits has places that differ")
    models, tasks = (list(dict.fromkeys(names)) for names in zip(*((p.model, p.task) for p in differing), strict=True))
    even = [
        f"{panel.model}, {panel.task}: {panel.accuracy[0][0]:.0f} % everywhere" for panel in panels if panel.is_even
    ]
    figure = new_figure(1.4 + max(2.6 * len(models), 3.6), 0.9 + 2.3 * len(tasks) + 0.17 * len(even))
    axes = figure.subplots(len(tasks), len(models), squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for panel in differing:
        _draw(axes[tasks.index(panel.task)][models.index(panel.model)], panel)
    if even:
        figure.supxlabel(literal("\n".join(even)), fontsize=8)
    figure.savefig(path, dpi=160)


def _make_panel(model: str, task: str, places: list[dict[str, float]]) -> PlacePanel:
    depths = tuple(sorted({place["depth"] for place in places}))
    lengths = tuple(sorted({int(place["length"]) for place in places}))
    accuracy = {(place["depth"], place["length"]): 100 * place["accuracy"] for place in places}
    missing = float("nan")
    table = tuple(tuple(accuracy.get((depth, length), missing) for length in lengths) for depth in depths)
    return PlacePanel(model, task, depths, lengths, table)


def _draw(axis: "Axes", panel: PlacePanel) -> None:
    axis.set_axis_on()
    axis.imshow(panel.accuracy, vmin=0, vmax=100, cmap="viridis", aspect="auto")
    for row, values in enumerate(panel.accuracy):
        for column, value in enumerate(values):
            dark = value < 60
            axis.text(column, row, f"{value:.0f}", ha="center", va="center", color="white" if dark else "black")
    axis.set_xticks(range(len(panel.lengths)), [str(length) for length in panel.lengths])
    axis.set_yticks(range(len(panel.depths)), [f"{depth:.0%}" for depth in panel.depths])
    axis.set_xlabel("tokens")
    axis.set_ylabel("depth")
    axis.set_title(literal(f"{panel.model}\n{panel.task}, %"), fontsize=9)
