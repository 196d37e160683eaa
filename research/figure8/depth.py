"""E5 of protocol.md: what twelve layers move, of the bits won in equal steps, and the sensitivity by layer and by λ.

    python -m research.figure8.depth [FOLDER]

Prints Markdown. Before all its trainings are there, it prints how many are there and nothing else.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Annotated, Any

import typer

from diffquant.measure.stats import Difference
from diffquant.reports.tables import markdown
from research.figure8.comparisons import (
    DIFFS,
    MAIN,
    PRIMARY,
    THREE,
    Comparison,
    bits_won,
    check_alike,
    perplexity_ratio,
    range_won,
    sensitivity_won,
)
from research.figure8.deciding import against_zero, change, decided, interval, lacking, section
from research.figure8.plan import KINDS, RESULTS, Result, results
from research.figure8.scoring import BITS
from research.studies.figure8_model import costs

NAMES = [f"e5-{kind}-seed-{seed}" for seed in THREE for kind in KINDS]
DEEP = [Comparison(kind, experiment="e5", seeds=THREE) for kind in DIFFS]
# What the primary comparisons measure, and what it is called.
WITH_12, CHANGE = "bits won with 12 layers", "change from 5 layers"
WORDS = ("above zero", "below zero")
EQUAL_STEPS = bits_won("2", among="kl_of_steps")
SECONDARY = {
    **{f"logits in steps of {step}": bits_won(step, among="kl_of_steps") for step in ("1", "4", "8")},
    **{
        f"`{bits}:{shared}`": bits_won(f"{bits}:{shared}") for shared in ("tensor", "row", "row:shift") for bits in BITS
    },
    f"web, `{PRIMARY}`": bits_won(PRIMARY, "web"),
    f"`{PRIMARY}`, from the range": range_won,
    f"`{PRIMARY}`, from the sensitivity": sensitivity_won,
    "perplexity over the Transformer's": perplexity_ratio,
}
# Something of a layer that a slope is taken over, by its number.
Place = Callable[[int, Mapping[str, Any]], float]
PLACES: dict[str, Place] = {
    "a layer's number": lambda number, _: number + 1,
    "a layer's mean λ": lambda _, layer: float(layer["lam"]["mean"]),
}


def excess(diff: Result, plain: Result) -> list[float]:
    """Compute log2 of each layer's sensitivity over that of the Transformer's same layer."""
    pairs = zip(diff["books"]["layers"], plain["books"]["layers"], strict=True)
    each = [[sum(costs(layer["sensitivity"], PRIMARY)) for layer in pair] for pair in pairs]
    return [math.log2(ours / theirs) for ours, theirs in each]


def slope_over(place: Place) -> Callable[[Result, Result], float]:
    """Measure the slope of the layers' excess over something of the DIFF model's layers."""

    def measure(diff: Result, plain: Result) -> float:
        places = [place(number, layer) for number, layer in enumerate(diff["books"]["layers"])]
        return linear_regression(places, excess(diff, plain)).slope

    return measure


def primary_comparisons(there: Mapping[str, Result]) -> dict[str, tuple[Difference, float]]:
    """Measure each kind's bits won with 12 layers and their change from 5, each with the p of its being zero.

    Raises:
        UsageError: the trainings may not be compared.
    """
    found = {}
    for deep, usual in zip(DEEP, MAIN, strict=True):
        check_alike([there[name] for each in (deep, usual) for pair in each.names for name in pair], ("size",))
        won, before = deep.values(there, EQUAL_STEPS), usual.values(there, EQUAL_STEPS)
        found[f"{deep.kind}, {WITH_12}"] = against_zero(won)
        found[f"{deep.kind}, {CHANGE}"] = change(before, won)
    return found


def summary(there: Mapping[str, Result]) -> str:
    """Everything in Markdown."""
    if said := lacking(there, NAMES):
        return said
    if any(len(deep.values(there, EQUAL_STEPS)) < 2 for deep in DEEP):
        return "Too many trainings diverged for an interval."
    return "\n\n".join(
        [
            section("Primary: logits in steps of 2, Holm over four", decided(primary_comparisons(there), WORDS)),
            section("Secondary: bits won with 12 layers, and with 5", _secondary(there)),
            section("Sensitivity over the Transformer's same layer, log2, and its slopes", _slopes(there)),
            section("By layer, means over trainings", _layers(there)),
            section("Rates", _rates(there)),
        ]
    )


def _secondary(there: Mapping[str, Result]) -> list[str]:
    columns = [*DEEP, *MAIN]
    rows = [[name, *(interval(each.values(there, measure)) for each in columns)] for name, measure in SECONDARY.items()]
    return markdown(["", *(f"{each.kind} of {each.experiment}" for each in columns)], rows)


def _slopes(there: Mapping[str, Result]) -> list[str]:
    columns = [*DEEP, *MAIN]
    rows = [
        [f"slope over {name}", *(interval(each.values(there, slope_over(place))) for each in columns)]
        for name, place in PLACES.items()
    ]
    return markdown(["", *(f"{each.kind} of {each.experiment}" for each in columns)], rows)


def _layers(there: Mapping[str, Result]) -> list[str]:
    rows = []
    for deep in DEEP:
        pairs = [(there[a], there[b]) for a, b in deep.names if "diverged" not in {*there[a], *there[b]}]
        of_layers = [diff["books"]["layers"] for diff, _ in pairs]
        excesses = zip(*(excess(*pair) for pair in pairs), strict=True)
        for number, (layers, found) in enumerate(zip(zip(*of_layers, strict=True), excesses, strict=True)):
            rows.append([deep.kind, str(number + 1), *_layer(layers), interval(found)])
    return markdown(["", "layer", "λ", "cancellation", "largest logit", "log2 excess sensitivity"], rows)


def _layer(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    lam = fmean(layer["lam"]["mean"] for layer in layers)
    largest = fmean(max(layer["largest"]) for layer in layers)
    return [f"{lam:.2f}", f"{fmean(layer['cancellation'] for layer in layers):.2f}", f"{largest:.1f}"]


def _rates(there: Mapping[str, Result]) -> list[str]:
    rows = []
    for name, result in there.items():
        if name.startswith("e5-"):
            perplexity = result["validation"]["perplexity"] or math.inf
            rows.append([name, f"{result['rate']:g}", f"{perplexity:.2f}"])
    return markdown(["run", "rate", "held-out perplexity"], rows)


def main(folder: Annotated[Path, typer.Argument(help="Folder of raw files.")] = RESULTS) -> None:
    """Compare twelve layers with five."""
    print(summary(results(folder)))


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
