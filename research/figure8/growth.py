"""E6 of protocol.md: what makes r, the Transformer's largest logits over DIFF's.

    python -m research.figure8.growth [FOLDER]

Prints Markdown: the first look at the models that ship, and the comparisons once the nine trainings are there.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import typer

from diffquant.measure.stats import Difference
from diffquant.reports.tables import markdown
from research.figure8.comparisons import DIFFS, SIX, THREE, Comparison, break_even, check_alike
from research.figure8.deciding import against_zero, decided, interval, lacking, section
from research.figure8.plan import DECAYS, GRID, KINDS, NO_FIRST, RESULTS, SHIPPED, Result, grid_name, results

SEEDS = range(113, 116)
NAMES = [f"e6-{kind}-seed-{seed}" for seed in SEEDS for kind in KINDS]
RECIPES = (NO_FIRST, *DECAYS)
USUAL = [Comparison(kind, experiment="e6", seeds=SEEDS) for kind in DIFFS]
Layers = Sequence[Mapping[str, Any]]
# A DIFF kind's trainings, each with the Transformer's of the seed, by the kind.
Pairs = Mapping[str, Sequence[tuple[Result, Result]]]
WORDS = ("grows", "shrinks")


def log2_r(diff: Layers, plain: Layers, what: str = "largest") -> float:
    """Compute log2 of the geometric mean over layers of the Transformer's largest logit over DIFF's."""
    return fmean(math.log2(max(layer[what])) for layer in plain) - fmean(math.log2(max(layer[what])) for layer in diff)


def log2_r_of_table_5(diff: Layers, plain: Layers, what: str = "largest") -> float:
    """Compute log2 of the ratio of the largest logits of all layers."""
    tops = [max(max(layer[what]) for layer in layers) for layers in (plain, diff)]
    return math.log2(tops[0] / tops[1])


def at_step(step: str) -> Callable[[Result], Layers]:
    """Take the layers that were recorded at a step."""
    return lambda result: result["range_by_step"][step]


def in_windows(length: str, start: str) -> Callable[[Result], Layers]:
    """Take the layers as windows of a length have them, as they are ("plain") or behind <s> ("first")."""
    return lambda result: result["range_by_length"][length][start]["layers"]


# What the primary comparisons go from and to.
SPANS = {
    "steps 225 to 1,800": (at_step("225"), at_step("1800")),
    "windows of 256 to 4,096": (in_windows("256", "first"), in_windows("4096", "first")),
}


def scored(result: Result) -> Layers:
    """Take the largest logits of a raw file's layers as E1 to E3 have them."""
    return [{"largest": [layer["logits"]["top"]["1"]]} for layer in result["outliers"]["layers"]]


def r_by(
    take: Callable[[Result], Layers], of: Callable[[Layers, Layers, str], float] = log2_r, what: str = "largest"
) -> Callable[[Result, Result], float]:
    """Measure log2 r of two models' layers."""
    return lambda diff, plain: of(take(diff), take(plain), what)


def summary(there: Mapping[str, Result]) -> str:
    """Everything in Markdown."""
    parts = []
    look = [f"e6-{kind}-read-seed-{SHIPPED}" for kind in KINDS]
    if all(name in there for name in look):
        check_alike([there[name] for name in look])
        first = {kind: [(there[name], there[look[0]])] for kind, name in zip(DIFFS, look[1:], strict=True)}
        parts.append(section(f"A first look: log2 r of the models that ship, seed {SHIPPED}", _by_length(first)))
    parts.append(section("Known: log2 r at the ends of other trainings", _known(there)))
    if said := lacking(there, NAMES):
        return "\n\n".join([*parts, said])
    pairs = usual_pairs(there)
    if min(map(len, pairs.values())) < 2:
        return "\n\n".join([*parts, "Too many trainings diverged for an interval."])
    primary = decided(changes(pairs), WORDS)
    return "\n\n".join(
        [
            *parts,
            section("Primary: change of log2 r by layer, Holm over four", primary),
            section("Over training: log2 r by step", _by_step(pairs)),
            section("Over length: log2 r", _by_length(pairs)),
            section("Weight on the first key, mean over layers of the first map", _on_first(there)),
            section("Other recipes, one training each: log2 r by layer", _recipes(there)),
        ]
    )


def usual_pairs(there: Mapping[str, Result]) -> Pairs:
    """Find each kind's trainings of the usual recipe that did not diverge, with the Transformer's of the seed.

    Raises:
        UsageError: they may not be compared.
    """
    return {each.kind: _pairs(there, each) for each in USUAL}


def _pairs(there: Mapping[str, Result], comparison: Comparison) -> list[tuple[Result, Result]]:
    pairs = [(there[a], there[b]) for a, b in comparison.names]
    check_alike([result for pair in pairs for result in pair])
    return [pair for pair in pairs if not any("diverged" in result for result in pair)]


def r_values(
    pairs: Sequence[tuple[Result, Result]],
    take: Callable[[Result], Layers],
    of: Callable[[Layers, Layers, str], float] = log2_r,
    what: str = "largest",
) -> list[float]:
    """Measure log2 r of every pair of trainings."""
    return [r_by(take, of, what)(*pair) for pair in pairs]


def changes(pairs: Pairs) -> dict[str, tuple[Difference, float]]:
    """Measure the four primary changes of log2 r by layer, each with the p of its being zero."""
    found = {}
    for kind, each in pairs.items():
        for name, ends in SPANS.items():
            before, after = (r_values(each, take) for take in ends)
            found[f"{kind}, {name}"] = against_zero([b - a for a, b in zip(before, after, strict=True)])
    return found


def _by_step(pairs: Pairs) -> list[str]:
    first = next(iter(pairs.values()))[0][0]
    rows = [
        [
            step,
            *(
                interval(r_values(pairs[kind], at_step(step), of))
                for of in (log2_r, log2_r_of_table_5)
                for kind in DIFFS
            ),
        ]
        for step in first["range_by_step"]
    ]
    return markdown(["step", *(f"{kind}, {how}" for how in ("by layer", "as in Table 5") for kind in DIFFS)], rows)


def _by_length(pairs: Pairs) -> list[str]:
    rows = []
    for length, starts in next(iter(pairs.values()))[0][0]["range_by_length"].items():
        for start in starts:
            take = in_windows(length, start)
            cells = [
                interval(r_values(pairs[kind], take, of, what))
                for kind in DIFFS
                for of, what in ((log2_r, "largest"), (log2_r_of_table_5, "largest"), (log2_r, "near"))
            ]
            rows.append([length, "with <s>" if start == "first" else "without", *cells])
    heads = [f"{kind}, {what}" for kind in DIFFS for what in ("by layer", "as in Table 5", "by layer, within 256 keys")]
    return markdown(["window", "", *heads], rows)


def _on_first(there: Mapping[str, Result]) -> list[str]:
    rows = []
    for kind in KINDS:
        row = [kind]
        for length in ("256", "4096"):
            for start in ("plain", "first"):
                layers = [in_windows(length, start)(there[f"e6-{kind}-seed-{seed}"]) for seed in SEEDS]
                row.append(interval([fmean(layer["weight_on_first"][0] for layer in each) for each in layers]))
        rows.append(row)
    return markdown(["", "256, without", "256, with <s>", "4,096, without", "4,096, with <s>"], rows)


def recipe_rows(there: Mapping[str, Result]) -> dict[str, list[str]]:
    """Write log2 r by layer of one training of each other recipe, beside what nine usual ones allow, by kind."""
    rows = {}
    for kind in DIFFS:
        six = Comparison(kind, seeds=SIX).values(there, r_by(scored))
        usual = six + Comparison(kind, experiment="e6", seeds=SEEDS).values(there, r_by(scored))
        low, high = tenth(usual)
        rows[kind] = [f"{fmean(usual):+.2f} [{low:+.2f}, {high:+.2f}]"]
        for recipe in RECIPES:
            pair = [there.get(f"e6-{each}{recipe}-seed-113") for each in (kind, "transformer")]
            rows[kind].append(_one(pair[0], pair[1], low, high))
    return rows


def _one(diff: Result | None, plain: Result | None, low: float, high: float) -> str:
    if diff is None or plain is None:
        return "not yet"
    if "diverged" in diff or "diverged" in plain:
        return "diverged"
    check_alike([diff, plain])
    value = r_by(scored)(diff, plain)
    return f"{value:+.2f}, {'within' if low <= value <= high else 'outside'}"


def tenth(values: Sequence[float]) -> tuple[float, float]:
    """Compute Student's 95 % prediction interval for one more value."""
    from scipy.stats import t

    half = t.ppf(0.975, len(values) - 1) * stdev(values) * math.sqrt(1 + 1 / len(values))
    return fmean(values) - half, fmean(values) + half


def _recipes(there: Mapping[str, Result]) -> list[str]:
    heads = ["", f"usual, interval of one more of {len(SIX) + len(SEEDS)}", *RECIPES]
    return markdown(heads, [[kind, *cells] for kind, cells in recipe_rows(there).items()])


def _known(there: Mapping[str, Result]) -> list[str]:
    rows = []
    for name, experiment, seeds in (("E1", "e1", SIX), ("E2", "e2", THREE), ("E3", "e3", THREE)):
        each = [Comparison(kind, experiment=experiment, seeds=seeds) for kind in DIFFS]
        rows.append([name, *(interval(one.values(there, r_by(scored))) for one in each)])
        rows.append([f"{name}, as in Table 5"])
        rows[-1] += [interval(one.values(there, r_by(scored, log2_r_of_table_5))) for one in each]
    rows.append(["break-even of E1", *(interval(Comparison(kind).values(there, break_even)) for kind in DIFFS)])
    for rate in GRID:
        found = [there.get(grid_name(kind, rate)) for kind in KINDS]
        if all(each and "outliers" in each for each in found):
            plain, *diffs = (scored(each) for each in found if each)
            rows.append([f"E1 at {rate:g}, seed 100", *(f"{log2_r(diff, plain):+.2f}" for diff in diffs)])
    return markdown(["log2 r", *DIFFS], rows)


def main(folder: Annotated[Path, typer.Argument(help="Folder of raw files.")] = RESULTS) -> None:
    """Say what the ratio of the logits' ranges follows."""
    print(summary(results(folder)))


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
