"""E8 of protocol.md: bits won by DIFF models of 16 million parameters, and their ranges, over three trainings.

    python -m research.figure8.sixteen [FOLDER]

Prints Markdown. Before all nine trainings are there, it prints how many are there and nothing else.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from diffquant.reports.tables import markdown
from research.figure8.comparisons import (
    DIFFS,
    PRIMARY,
    Comparison,
    as_ratio,
    bits_won,
    break_even,
    perplexity_ratio,
    range_won,
    sensitivity_won,
)
from research.figure8.deciding import interval, lacking, section
from research.figure8.gpu import SEEDS
from research.figure8.growth import in_windows, log2_r_of_table_5, r_by
from research.figure8.plan import KINDS, RESULTS, Result, results

LARGEST = [Comparison(kind, experiment="e8", seeds=SEEDS) for kind in DIFFS]
MEASURES = {
    "bits won in steps of 2": bits_won("2", among="kl_of_steps"),
    f"bits won at `{PRIMARY}`": bits_won(PRIMARY),
    "from the range": range_won,
    "from the sensitivity": sensitivity_won,
    "log2 r by layer, windows of 1,024 with <s>": r_by(in_windows("1024", "first")),
    "log2 r as in Table 5, the same": r_by(in_windows("1024", "first"), log2_r_of_table_5),
    "perplexity over the Transformer's": perplexity_ratio,
}


def summary(there: Mapping[str, Result]) -> str:
    """Everything in Markdown."""
    if said := lacking(there, [f"e8-{kind}-seed-{seed}" for seed in SEEDS for kind in KINDS], withheld="no interval"):
        return said
    rows = [[name, *(interval(each.values(there, measure)) for each in LARGEST)] for name, measure in MEASURES.items()]
    levels = [each.values(there, break_even) for each in LARGEST]
    rows.append(["break-even r", *(f"{as_ratio(level).mean:.2f}" if len(level) > 1 else "none" for level in levels)])
    return section("16 million parameters, 12 layers, windows of 1,024", markdown(["three trainings", *DIFFS], rows))


def main(folder: Annotated[Path, typer.Argument(help="Folder of raw files.")] = RESULTS) -> None:
    """Compare the nine trainings of E8."""
    print(summary(results(folder)))


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
