"""How much chance there is in a rounding that descends: five seeds of `tuned` and of AutoRound, on each model.

    python -m research.studies.rounding_repeats $EARLIER/prose-* -o research/results/rounding/repeats
    python -m research.studies.rounding_repeats --show research/results/rounding/repeats/*

EARLIER is the folder of the English models that shipped first; diffquant/data/pocket/README.md says how to fetch them.

A seed decides the order in which a text's windows are read, and of AutoRound what else it draws. Everything else is as
in `research.studies.rounding`, at 4 bits with groups of 32. A file a model; what it holds is not measured again.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import typer

from diffquant.measure.stats import Difference
from diffquant.reports.tables import markdown
from diffquant.support.progress import progress_for
from research.studies.quantizers import ours
from research.studies.rounded_model import RoundingOptions
from research.studies.rounding import measure_methods, read_result
from research.studies.rounding_method import TIERS, Method
from research.studies.text_quantizers import auto_round

SEEDS = range(5)
RULES = ("tuned", "AutoRound")
ELSEWHERE = ", elsewhere"
METHODS = tuple(
    method
    for seed in SEEDS
    for method in (
        Method(f"tuned, seed {seed}", TIERS[0], ours("tuned", 4, 32, {"seed": seed})),
        Method(f"AutoRound, seed {seed}", TIERS[0], auto_round(4, 32, seed), "auto-round"),
    )
)


def main(
    paths: Annotated[list[Path], typer.Argument(help="Checkpoint folders; with --show, results.")],
    characters: Annotated[int, typer.Option(help="Characters that are scored of each text.")] = 65536,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder of a file a model.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Only print results side by side.")] = False,
) -> None:
    """Repeat roundings that descend with other seeds."""
    if show or output is None:
        print(spread_table([read_result(path) for path in paths]))
        return
    options = RoundingOptions(characters=characters, window=256, items=0)
    for path in paths:
        measure_methods(path, options, METHODS, output / f"{path.name}.json", progress_for(path.name))


def divergences(result: dict[str, Any], rule: str, elsewhere: bool = False) -> list[float]:
    """KL of a rule's repeats, in nats, by seed."""
    rows = [result["results"][f"{rule}, seed {seed}"] for seed in SEEDS]
    return [row["elsewhere"]["kl"] if elsewhere else row["kl"] for row in rows]


def spread(result: dict[str, Any], rule: str, elsewhere: bool = False) -> float:
    """By how many percent a seed moves the KL of a rule: a standard deviation."""
    return 100 * stdev(map(math.log, divergences(result, rule, elsewhere)))


def lead(result: dict[str, Any], elsewhere: bool = False) -> Difference:
    """By how much, in percent, AutoRound's KL is above `tuned`'s, with an interval over seeds.

    Seeds of two programs have nothing in common, so this is Welch's interval of the difference of mean logarithms.
    """
    from scipy.stats import ttest_ind

    by_ours, by_theirs = ([math.log(kl) for kl in divergences(result, rule, elsewhere)] for rule in RULES)
    interval = ttest_ind(by_theirs, by_ours, equal_var=False).confidence_interval()
    return Difference(*(100 * math.expm1(x) for x in (fmean(by_theirs) - fmean(by_ours), interval.low, interval.high)))


def spread_cells(result: dict[str, Any], elsewhere: bool) -> list[str]:
    """Mean KL of both rules, how far a seed moves it, and the lead."""
    cells = []
    for rule in RULES:
        found = divergences(result, rule, elsewhere)
        cells += [f"{fmean(found):.5f}", f"{spread(result, rule, elsewhere):.1f} %"]
    won = lead(result, elsewhere)
    return [*cells, f"{won.mean:+.1f} [{won.low:+.1f}, {won.high:+.1f}] %"]


def spread_table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: `spread_cells` of every model and text."""
    rows = [
        [result["settings"]["model"] + (ELSEWHERE if elsewhere else ""), *spread_cells(result, elsewhere)]
        for result in results
        for elsewhere in (False, True)
    ]
    heads = [head for rule in RULES for head in (f"{rule}: KL, nats", "spread")]
    return "\n".join(markdown(["model", *heads, "AutoRound's above tuned's"], rows))


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
