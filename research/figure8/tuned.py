"""E7 of protocol.md: what rounding costs models that were trained further with rounded logits.

    python -m research.figure8.tuned [FOLDER]

Prints Markdown: the first look at one training each, and the comparisons once all their runs are there.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from diffquant.reports.tables import markdown
from research.figure8.comparisons import DIFFS, check_alike
from research.figure8.deciding import DIFF_VERDICTS, against_zero, decided, interval, lacking, section
from research.figure8.plan import KINDS, RESULTS, SHIPPED, TUNED, Result, results
from research.studies.figure8_model import costs

SEEDS = range(113, 116)
CONTROL, ROUNDED = "-tuned", {scheme: arm for arm, scheme in TUNED.items() if scheme != "16"}
PRIMARY = "4:tensor"
# Loss of a model at a scheme, in nats a token.
Loss = Callable[[Result, str], float]

Costs = dict[str, list[float]]


def on_books(result: Result, scheme: str) -> float:
    """Loss on the text of the primary comparisons."""
    return fmean(result["books"]["nll"][scheme])


def on_held_out(result: Result, scheme: str) -> float:
    """Loss on held-out windows of the training text."""
    return float(result["held_out"][scheme]["nll"])


def run_name(kind: str, arm: str, seed: int) -> str:
    """Name of the run of a kind, an arm and a seed."""
    return f"e7-{kind}{arm}-seed-{seed}"


def names_of(seeds: Sequence[int]) -> list[str]:
    """Names of the runs of some seeds."""
    return [run_name(kind, arm, seed) for seed in seeds for kind in KINDS for arm in TUNED]


def sound_seeds(there: Mapping[str, Result], seeds: Sequence[int]) -> list[int]:
    """Seeds of which no run diverged.

    Raises:
        UsageError: runs may not be compared.
    """
    runs = {seed: [there[run_name(kind, arm, seed)] for kind in KINDS for arm in TUNED] for seed in seeds}
    check_alike([each for of_seed in runs.values() for each in of_seed])
    return [seed for seed, of_seed in runs.items() if not any("diverged" in each for each in of_seed)]


def cost(
    there: Mapping[str, Result], kind: str, arm: str, seed: int, scheme: str = PRIMARY, loss: Loss = on_books
) -> float:
    """Compute the loss of an arm's model at a scheme less that of the control at 16 bits, in nats a token."""
    trained, control = (there[run_name(kind, each, seed)] for each in (arm, CONTROL))
    return loss(trained, scheme) - loss(control, "16")


def won(
    there: Mapping[str, Result], kind: str, arm: str, seeds: Sequence[int], scheme: str = PRIMARY, loss: Loss = on_books
) -> list[float]:
    """Compute the bits won over the Transformer, by seed; empty if a cost is not above zero."""
    pairs = [[cost(there, each, arm, seed, scheme, loss) for each in ("transformer", kind)] for seed in seeds]
    return [math.log2(plain / diff) / 2 for plain, diff in pairs] if min(map(min, pairs), default=0.0) > 0 else []


def more_nats(there: Mapping[str, Result], kind: str, arm: str, seeds: Sequence[int], scheme: str) -> list[float]:
    """Compute by how much a kind's cost is above the Transformer's, by seed, in thousandths of a nat a token."""
    each = [[cost(there, which, arm, seed, scheme) for which in (kind, "transformer")] for seed in seeds]
    return [1000 * (diff - plain) for diff, plain in each]


def summary(there: Mapping[str, Result]) -> str:
    """Everything in Markdown."""
    parts = []
    if not lacking(there, names_of([SHIPPED])):
        parts.append(
            section(f"A first look: seed {SHIPPED}, one training each, no interval", _tables(there, [SHIPPED]))
        )
    if said := lacking(there, names_of(SEEDS), "runs"):
        return "\n\n".join([*parts, said])
    seeds = sound_seeds(there, SEEDS)
    found = {kind: won(there, kind, ROUNDED[PRIMARY], seeds) for kind in DIFFS}
    if len(seeds) > 1 and all(found.values()):
        named = {f"{kind} over the Transformer": against_zero(values) for kind, values in found.items()}
        primary = decided(named, DIFF_VERDICTS)
    else:
        primary = ["A cost is not above zero, or too many runs diverged: there are no bits won, only nats (below)."]
    title = f"Primary: bits won at `{PRIMARY}` after training for it, seeds {', '.join(map(str, seeds))}"
    parts.append(section(title, primary))
    parts.append(section("All arms", _tables(there, seeds)))
    return "\n\n".join(parts)


def _tables(there: Mapping[str, Result], seeds: Sequence[int]) -> list[str]:
    return [*_costs(there, seeds), "", *_won(there, seeds), "", *_means(there, seeds)]


def _costs(there: Mapping[str, Result], seeds: Sequence[int]) -> list[str]:
    """What rounding costs each kind, in thousandths of a nat a token, by the arm."""
    rows = [
        [
            kind,
            arm.removeprefix("-"),
            *(
                interval([1000 * cost(there, kind, arm, seed, scheme, loss) for seed in seeds])
                for loss in (on_books, on_held_out)
                for scheme in ("16", *ROUNDED)
            ),
        ]
        for kind in KINDS
        for arm in TUNED
    ]
    heads = [f"{text}, {scheme}" for text in ("books", "held out") for scheme in ("16", *ROUNDED)]
    return markdown(["cost, 0.001 nats", "arm", *heads], rows)


def _won(there: Mapping[str, Result], seeds: Sequence[int]) -> list[str]:
    """Bits won before and after training for a scheme, and the change."""
    rows = []
    for scheme, arm in ROUNDED.items():
        for kind in DIFFS:
            for name, loss in (("books", on_books), ("held out", on_held_out)):
                before, after = (won(there, kind, each, seeds, scheme, loss) for each in (CONTROL, arm))
                gained = [b - a for a, b in zip(before, after, strict=False)]
                nats = more_nats(there, kind, arm, seeds, scheme) if loss is on_books else []
                rows.append([f"{kind}, `{scheme}`, {name}", *map(interval, (before, after, gained)), interval(nats)])
    heads = ["before", "after", "after − before", "cost above the Transformer's, 0.001 nats"]
    return markdown(["bits won", *heads], rows)


def _means(there: Mapping[str, Result], seeds: Sequence[int]) -> list[str]:
    """What changes within: the largest logit, and the sensitivity to noise on each map of every layer."""
    rows = []
    for kind in KINDS:
        for arm in TUNED:
            each = [there[run_name(kind, arm, seed)] for seed in seeds]
            sensitivity = [math.log2(_sensitivity(result)) for result in each]
            largest = [result["outliers"]["logits"]["top"]["1"] for result in each]
            rows.append([kind, arm.removeprefix("-"), interval(largest), interval(sensitivity)])
    return markdown(["", "arm", "largest logit", "log2 of KL per unit of variance"], rows)


def _sensitivity(result: Result) -> float:
    return sum(sum(costs(layer["sensitivity"], PRIMARY)) for layer in result["books"]["layers"])


def main(folder: Annotated[Path, typer.Argument(help="Folder of raw files.")] = RESULTS) -> None:
    """Compare the arms of E7."""
    print(summary(results(folder)))


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
