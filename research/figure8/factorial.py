"""E4 of protocol.md: how many bits the second map and V1's norm win, each alone and together.

    python -m research.figure8.factorial [FOLDER]

Prints Markdown. Before all trainings of the four cells are there, it prints how many are there and nothing else.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from diffquant.measure.stats import Difference
from diffquant.reports.tables import markdown
from research.figure8.comparisons import PRIMARY, check_alike
from research.figure8.deciding import against_zero, interval, lacking, section, shown, verdicts
from research.figure8.plan import CELLS, RESULTS, Result, results
from research.figure8.scoring import BITS
from research.studies.figure8_model import parts

SEEDS = range(107, 113)
# Weights of the cells in each effect, by number of maps and whether there is a norm.
EFFECTS: dict[str, dict[tuple[int, bool], float]] = {
    "second map": {(2, False): 0.5, (1, False): -0.5, (2, True): 0.5, (1, True): -0.5},
    "norm": {(1, True): 0.5, (1, False): -0.5, (2, True): 0.5, (2, False): -0.5},
    "interaction": {(2, True): 1.0, (2, False): -1.0, (1, True): -1.0, (1, False): 1.0},
}
NEIGHBOURS: dict[str, dict[tuple[int, bool], float]] = {
    "second map without the norm": {(2, False): 1.0, (1, False): -1.0},
    "second map with the norm": {(2, True): 1.0, (1, True): -1.0},
    "norm with one map": {(1, True): 1.0, (1, False): -1.0},
    "norm with two maps": {(2, True): 1.0, (2, False): -1.0},
}

# Something of a training that grows with the square of the rounding step, as KL does.
Cost = Callable[[Result], float]


def kl(scheme: str, among: str = "kl", text: str = "books") -> Cost:
    """Cost that is the KL of a scheme, in nats."""
    return lambda training: fmean(training[text][among][scheme])


PRIMARY_COSTS = {"logits in steps of 2": kl("2", "kl_of_steps"), f"`{PRIMARY}`": kl(PRIMARY)}
SECONDARY_COSTS: dict[str, Cost] = {
    **{f"logits in steps of {step}": kl(step, "kl_of_steps") for step in ("1", "4", "8")},
    **{f"`{bits}:{shared}`": kl(f"{bits}:{shared}") for shared in ("tensor", "row", "row:shift") for bits in BITS},
    f"web, `{PRIMARY}`": kl(PRIMARY, text="web"),
    f"`{PRIMARY}`, from the range": lambda training: parts(training["books"], PRIMARY)[0],
    f"`{PRIMARY}`, from the sensitivity": lambda training: parts(training["books"], PRIMARY)[1],
}


def run_name(cell: tuple[int, bool], seed: int) -> str:
    """Name of the run of a cell and a seed."""
    return f"e4-{CELLS[cell]}-seed-{seed}"


def bits_won(there: Mapping[str, Result], weights: Mapping[tuple[int, bool], float], cost: Cost) -> list[float]:
    """Compute the bits that an effect wins, by seed; a seed with a training that diverged has none.

    Raises:
        UsageError: the trainings may not be compared.
    """
    cells = [{cell: there[run_name(cell, seed)] for cell in CELLS} for seed in SEEDS]
    check_alike([training for of_seed in cells for training in of_seed.values()])
    return [
        sum(weight * -math.log2(cost(of_seed[cell])) / 2 for cell, weight in weights.items())
        for of_seed in cells
        if not any("diverged" in training for training in of_seed.values())
    ]


def primary_comparisons(there: Mapping[str, Result]) -> dict[tuple[str, str], tuple[Difference, float, str]]:
    """Bits won, p after Holm and the verdict, of each measure and effect."""
    found = {
        (measure, effect): against_zero(bits_won(there, weights, cost))
        for measure, cost in PRIMARY_COSTS.items()
        for effect, weights in EFFECTS.items()
    }
    return verdicts(found, ("wins", "loses"))


def summary(there: Mapping[str, Result]) -> str:
    """Everything in Markdown."""
    if said := lacking(there, [run_name(cell, seed) for seed in SEEDS for cell in CELLS]):
        return said
    primary = [
        [*at, _by_seed(there, *at), shown(mean), f"{p:.2g}", said]
        for at, (mean, p, said) in primary_comparisons(there).items()
    ]
    sections = {
        "Primary: bits won, Holm over six": markdown(["", "", "by seed", "mean", "p, Holm", "verdict"], primary),
        "Share of what V1 wins over its wide heads alone": _shares(there),
        "Neighbouring cells": _effects(there, NEIGHBOURS, PRIMARY_COSTS),
        "Secondary: bits won": _effects(there, EFFECTS, SECONDARY_COSTS),
        "Trainings": _trainings(there),
    }
    return "\n\n".join(section(title, lines) for title, lines in sections.items())


def _by_seed(there: Mapping[str, Result], measure: str, effect: str) -> str:
    return " ".join(f"{won:+.2f}" for won in bits_won(there, EFFECTS[effect], PRIMARY_COSTS[measure]))


def _shares(there: Mapping[str, Result]) -> list[str]:
    rows = []
    for measure, cost in PRIMARY_COSTS.items():
        each = [fmean(bits_won(there, EFFECTS[effect], cost)) for effect in ("second map", "norm")]
        rows.append([measure, f"{sum(each):+.2f}", *(f"{effect / sum(each):.0%}" for effect in each)])
    return markdown(["", "bits won by both", "second map", "norm"], rows)


def _effects(
    there: Mapping[str, Result], effects: Mapping[str, Mapping[tuple[int, bool], float]], costs: Mapping[str, Cost]
) -> list[str]:
    rows = [
        [measure, *(interval(bits_won(there, weights, cost)) for weights in effects.values())]
        for measure, cost in costs.items()
    ]
    return markdown(["", *effects], rows)


def _trainings(there: Mapping[str, Result]) -> list[str]:
    rows = []
    for seed in SEEDS:
        trainings = [there[run_name(cell, seed)] for cell in CELLS]
        shown = [f"{each['validation']['perplexity'] or math.inf:.2f} ({each['rate']:g})" for each in trainings]
        instructions = {" ".join(each["environment"]["instructions"]) for each in trainings}
        rows.append([str(seed), *shown, "; ".join(sorted(instructions))])
    return markdown(["held-out perplexity (rate)", *CELLS.values(), "instructions"], rows)


def main(folder: Annotated[Path, typer.Argument(help="Folder of raw files.")] = RESULTS) -> None:
    """Compare the four cells of E4."""
    print(summary(results(folder)))


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
