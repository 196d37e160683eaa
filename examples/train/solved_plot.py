"""Plot of every run's retrieval by step, and of the share of runs that retrieve."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from models import CONTROLS, KINDS

from diffquant.report.plots import COLOURS, STYLES, new_figure, tidy

_KINDS = (*KINDS, *CONTROLS)


def write_plot(runs: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write a figure with a panel of every run's share retrieved for each N, and one of the share of runs solved."""
    needles = list(runs[0]["solved"])
    figure = new_figure(3.6 * (len(needles) + 1), 3.4)
    *panels, last = figure.subplots(1, len(needles) + 1, sharex=True, sharey=True)
    for axis, n in zip(panels, needles, strict=True):
        for run in runs:
            number = _KINDS.index(run["kind"])
            steps = [0, *(each["step"] for each in run["evaluations"])]
            shares = [0.0, *(each["retrieved"][n] for each in run["evaluations"])]
            axis.plot(steps, shares, STYLES[number % len(STYLES)], color=COLOURS[number], linewidth=1, alpha=0.8)
        axis.set_title(f"retrieved, N = {n}", fontsize=10)
    for kind in dict.fromkeys(run["kind"] for run in runs):
        style, colour = STYLES[_KINDS.index(kind) % len(STYLES)], COLOURS[_KINDS.index(kind)]
        last.step(*share_solved(runs, kind, needles[-1]), style, where="post", color=colour, label=kind)
    last.set_title(f"runs that retrieve, N = {needles[-1]}", fontsize=10)
    for axis in (*panels, last):
        axis.set_xlabel("step")
        tidy(axis, "both")
    panels[0].set_ylabel("share")
    panels[0].set_ylim(-0.02, 1.05)
    figure.legend(loc="outside lower center", ncols=len(_KINDS), frameon=False, fontsize=9)
    figure.savefig(file, dpi=150)


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
