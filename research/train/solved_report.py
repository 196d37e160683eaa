"""Tell how long each kind of model took to retrieve: table and plot of the runs that `solved.py` left.

    python -m research.train.solved_report runs/solved

The table has medians and ranges, the plot every run.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from diffquant.errors import UsageError
from diffquant.reports.plots import new_figure, series_style, style_axis
from diffquant.reports.tables import align_columns
from diffquant.support.program import run_program
from research.train.models import CONTROLS, KINDS

RETRIEVED = "retrieved.json"
_KINDS = (*KINDS, *CONTROLS)

Run = dict[str, Any]


def report(folder: Annotated[Path, typer.Argument(help="Output folder of solved.py.")]) -> None:
    """Print the table of a folder's runs and draw solved.png there."""
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob(f"*/{RETRIEVED}"))]
    if not runs:
        raise UsageError(f"{folder} holds no runs; solved.py makes them")
    print(solved_summary(runs))
    write_plot(runs, folder / "solved.png")


def last_step(run: Run) -> int:
    """Step of a run's last evaluation."""
    step: int = run["evaluations"][-1]["step"]
    return step


def solved_summary(runs: Sequence[Run]) -> str:
    """Table of each kind's median and range of steps; a run that was not solved counts as longer than any."""
    lines = []
    for kind in _kinds_of(runs):
        of_kind = [run for run in runs if run["kind"] == kind]
        for n in runs[0]["solved"]:
            steps = [math.inf if run["solved"][n] is None else run["solved"][n] for run in of_kind]
            unsolved = [last_step(run) for run in of_kind if run["solved"][n] is None]
            figures = (statistics.median(steps), min(steps), max(steps))
            texts = [f"{step:.0f}" if step < math.inf else f"> {min(unsolved)}" for step in figures]
            lines.append([kind, n, str(len(steps)), str(len(steps) - len(unsolved)), *texts])
    return "\n".join(align_columns(["kind", "N", "runs", "solved", "median", "least", "most"], lines, names=2))


def write_plot(runs: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write a figure with a panel of every run's share retrieved for each N, and one of the share of runs solved."""
    needles = list(runs[0]["solved"])
    figure = new_figure(3.6 * (len(needles) + 1), 3.4)
    *panels, last = figure.subplots(1, len(needles) + 1, sharex=True, sharey=True)
    for axis, n in zip(panels, needles, strict=True):
        for run in runs:
            steps = [0, *(each["step"] for each in run["evaluations"])]
            shares = [0.0, *(each["retrieved"][n] for each in run["evaluations"])]
            axis.plot(steps, shares, **_look(run["kind"]), linewidth=1, alpha=0.8)
        axis.set_title(f"retrieved, N = {n}", fontsize=10)
    for kind in _kinds_of(runs):
        last.step(*share_solved(runs, kind, needles[-1]), where="post", label=kind, **_look(kind))
    last.set_title(f"runs that retrieve, N = {needles[-1]}", fontsize=10)
    for axis in (*panels, last):
        axis.set_xlabel("step")
        style_axis(axis, "both")
    panels[0].set_ylabel("share")
    panels[0].set_ylim(-0.02, 1.05)
    figure.legend(loc="outside lower center", ncols=len(_KINDS), frameon=False, fontsize=9)
    figure.savefig(file, dpi=150)


def _look(kind: str) -> dict[str, str]:
    return {name: value for name, value in series_style(_KINDS.index(kind)).items() if name != "marker"}


def share_solved(runs: Sequence[Mapping[str, Any]], kind: str, n: str) -> tuple[list[int], list[float]]:
    """Steps from 0 on and the share of a kind's runs that are solved by each, as Kaplan and Meier estimate it.

    A run that ended unsolved says nothing of later steps, and runs may end at different ones.
    """
    of_kind = [run for run in runs if run["kind"] == kind]
    ends = [run["evaluations"][-1]["step"] for run in of_kind]
    solved = [run["solved"][n] for run in of_kind]
    steps, shares = [0], [0.0]
    for step in sorted({step for step in solved if step is not None}):
        at_risk = sum(step <= (end if done is None else done) for end, done in zip(ends, solved, strict=True))
        steps.append(step)
        shares.append(1 - (1 - shares[-1]) * (1 - solved.count(step) / at_risk))
    return [*steps, max(ends)], [*shares, shares[-1]]


def _kinds_of(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted({run["kind"] for run in runs}, key=_KINDS.index)


if __name__ == "__main__":
    run_program(report)
