"""Multi-needle retrieval as a task, with a plot of accuracy by depth and length.

Source: the plot's presentation follows figure 5 of arXiv 2410.05258.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from diffquant.errors import UsageError
from diffquant.measure.cells import Cell
from diffquant.measure.results import ITEMS, TaskResult
from diffquant.measure.stats import standard_error
from diffquant.measure.task import LIMIT, NEEDLE_LENGTHS, TEXT, Task, TaskOption, read_positive_option
from diffquant.measure.tasks import register
from diffquant.reports.plots import escape_dollars, new_figure
from diffquant.support.names import split_numbers
from diffquant.support.plain_data import JsonObject
from diffquant.support.progress import Progress

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from diffquant.measure.language_model import LanguageModel, ModelOutputs
    from diffquant.measure.protocols.needle import NeedlePlan


def _read_lengths(text: str) -> tuple[int, ...]:
    return split_numbers("lengths", text, "1024,4096")


LENGTHS = TaskOption[tuple[int, ...]](
    "lengths",
    NEEDLE_LENGTHS,
    "Lengths of needle prompts in tokens, such as 256,1K,4K.",
    str,
    written="256",
    read=_read_lengths,
)


def accuracy_by_depth(cell: Cell) -> dict[tuple[float, int], float]:
    """Return the accuracy in percent of a measured needle cell, by (depth, prompt length)."""
    places = cell.result.details["by_place"] if cell.result else []
    return {(place["depth"], int(place["length"])): 100 * place["accuracy"] for place in places}


def plot_accuracy_grid(cells: Sequence[tuple[str, Cell]], path: Path) -> None:
    """Draw needle accuracy at 16 bits by depth (rows) and length (columns), with a panel per model and task.

    If the accuracy is the same at all depths and lengths, a line of text replaces the panel.

    Args:
        cells: needle cells, each with its model's name.
        path: file to write, whose suffix determines the format.

    Raises:
        UsageError: no needle cell was measured at 16 bits, or each has the same accuracy at all depths and
            lengths.
    """
    panels = {(name, cell.task): accuracy_by_depth(cell) for name, cell in cells if cell.point.is_baseline}
    differing = {key: places for key, places in panels.items() if len({*places.values()}) > 1}
    if not differing:
        raise UsageError("nothing to plot: no needle cell at 16 bits has an accuracy that differs by depth or length")
    models, tasks = (list(dict.fromkeys(names)) for names in zip(*differing, strict=True))
    even = [
        f"{model}, {task}: {next(iter(places.values())):.0f} % everywhere"
        for (model, task), places in panels.items()
        if (model, task) not in differing
    ]
    figure = new_figure(1.4 + max(2.6 * len(models), 3.6), 0.9 + 2.3 * len(tasks) + 0.17 * len(even))
    axes = figure.subplots(len(tasks), len(models), squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for (model, task), places in differing.items():
        axis = axes[tasks.index(task)][models.index(model)]
        _draw_places(axis, places)
        axis.set_title(escape_dollars(f"{model}\n{task}, %"), fontsize=9)
    if even:
        figure.supxlabel(escape_dollars("\n".join(even)), fontsize=8)
    figure.savefig(path, dpi=160)


def _draw_places(axis: "Axes", places: dict[tuple[float, int], float]) -> None:
    depths, lengths = (sorted({*values}) for values in zip(*places, strict=True))
    accuracy = [[places.get((depth, length), float("nan")) for length in lengths] for depth in depths]
    axis.set_axis_on()
    axis.imshow(accuracy, vmin=0, vmax=100, cmap="viridis", aspect="auto")
    for row, values in enumerate(accuracy):
        for column, value in enumerate(values):
            dark = value < 60
            axis.text(column, row, f"{value:.0f}", ha="center", va="center", color="white" if dark else "black")
    axis.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axis.set_xlabel("tokens")
    axis.set_ylabel("depth")


@register
@dataclass(frozen=True, kw_only=True)
class Needle(Task):
    """Retrieval of numbers hidden in prose; the items depend on the tokenizer.

    Attributes:
        text: prose in which the numbers are hidden.
        plan: settings that determine the items.
        limit: number of items to measure, or None to take all.
    """

    kind: ClassVar = "needle"
    usage: ClassVar = "needle[:N[:R]]"
    options: ClassVar = (LIMIT, TEXT, LENGTHS)
    columns: ClassVar = ITEMS
    plots: ClassVar = {"places.png": plot_accuracy_grid}

    text: str
    plan: "NeedlePlan"
    limit: int | None

    @classmethod
    def parse(cls, name: str, values: Mapping[str, object], batch_tokens: int) -> Self:
        from diffquant.checkpoints.texts import load_text
        from diffquant.measure.protocols.needle import NeedlePlan

        counts = name.split(":")[1:]
        if len(counts) > 2 or not all(re.fullmatch("[0-9]{1,9}", count) for count in counts):
            raise cls.make_name_error(name, "needle:4:2")
        needles, asked = (*map(int, counts), 1, 1)[:2]
        # A length that is given twice would count the same items twice.
        plan = NeedlePlan(needles, asked, tuple(dict.fromkeys(LENGTHS.value_in(values))))
        text = load_text(TEXT.value_in(values))
        return cls(text=text, plan=plan, limit=read_positive_option(LIMIT, values), batch_tokens=batch_tokens)

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.plan.needles}:{self.plan.asked}"

    @property
    def total_tokens(self) -> int:
        return sum(self.plan.item_lengths[: self.limit])

    def identity(self) -> JsonObject:
        from diffquant.checkpoints.texts import text_digest
        from diffquant.measure.protocols.needle import ITEMS_FORMAT

        return {
            "name": self.name,
            "items": ITEMS_FORMAT,
            "text": text_digest(self.text),
            "lengths": list(self.plan.lengths),
            "samples": self.plan.samples,
            "seed": self.plan.seed,
            "limit": self.limit,
            "batch_tokens": self.batch_tokens,
        }

    def run(self, model: "LanguageModel", reference: "ModelOutputs | None", progress: Progress) -> TaskResult:  # noqa: ARG002
        from diffquant.measure.protocols import needle

        items, retrieved = needle.evaluate_needle(model, self.text, self.plan, self.limit, self.batch_tokens, progress)
        score = sum(retrieved) / len(retrieved)
        return TaskResult(
            metric="retrieved",
            score=score,
            n=len(items),
            values=retrieved,
            details={
                "retrieved": score,
                "retrieved_se": standard_error(retrieved),
                "items": needle.needle_digest(items),
                "by_place": needle.compute_accuracy_grid(items, retrieved),
            },
        )
