"""The raw files, compared as protocol.md lays down.

    python -m research.figure8.analysis [FOLDER]

Prints Markdown: how many trainings there are, each kind's rate, the comparisons with intervals over trainings, and the
controls. Before a comparison has all its trainings, it has no interval and no verdict.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import typer

from diffquant.errors import UsageError
from diffquant.measure.stats import Difference, mean_interval
from diffquant.reports.tables import markdown
from diffquant.support.installation import CHANGED
from research.figure8.direction import along, moved, place_of
from research.figure8.plan import (
    CHECKS,
    EDGES,
    EQUALIZED,
    GRID,
    KINDS,
    OUTLIERS,
    RESULTS,
    Result,
    best_rate,
    grid_name,
    results,
)
from research.figure8.scoring import BITS, FORMATS, SCHEMES
from research.studies.figure8_model import advantage, parts_won
from research.studies.kv_decoded import LONG
from research.studies.kv_results import TEXTS

DIFFS = KINDS[1:]
SIX, THREE = range(101, 107), range(101, 104)
PRIMARY = "4:tensor"
LEVEL = 0.05
# What the trainings of a comparison have in common.
_SAME: dict[str, Callable[[Result], Any]] = {
    "arithmetic": lambda each: each["arithmetic"],
    "size": lambda each: each["size"],
    "steps": lambda each: each["steps"],
    "training text": lambda each: each["training_text"]["sha256"],
    "scored text": lambda each: each.get("books", {}).get("reading", {}).get("text"),
}

# Ratios of the ranges of logits, the Transformer's over the DIFF model's.
RATIOS = (1, 2, 4, 8)
# The paper's: largest attention logits of its Transformer and of its DIFF, arXiv 2410.05258, Table 5.
PAPER_RATIO = 318.0 / 38.8

Measure = Callable[[Result, Result], float]


@dataclass(frozen=True)
class Comparison:
    """One kind against another, seed by seed.

    Attributes:
        kind, base: kinds of the models, bits won by the first.
        experiment: beginning of the runs' names.
        seeds: seeds that the protocol asks for.
    """

    kind: str
    base: str = "transformer"
    experiment: str = "e1"
    seeds: Sequence[int] = SIX

    @property
    def names(self) -> list[tuple[str, str]]:
        """Names of each seed's two runs."""
        return [
            (f"{self.experiment}-{self.kind}-seed-{seed}", f"{self.experiment}-{self.base}-seed-{seed}")
            for seed in self.seeds
        ]

    def is_complete(self, there: Mapping[str, Result]) -> bool:
        """Whether every training is there, diverged or not."""
        return all(name in there for pair in self.names for name in pair)

    def values(self, there: Mapping[str, Result], measure: Measure) -> list[float]:
        """A measure of every pair of trainings that is there; one that diverged has none.

        Raises:
            UsageError: the trainings may not be compared.
        """
        found = [(there[a], there[b]) for a, b in self.names if a in there and b in there]
        check_alike([result for pair in found for result in pair])
        return [measure(*pair) for pair in found if not any("diverged" in result for result in pair)]


def check_alike(trainings: Sequence[Result], apart_from: Sequence[str] = ()) -> None:
    """Check that trainings may be compared.

    Args:
        apart_from: what they may differ in, as `_SAME` names it.

    Raises:
        UsageError: their sources were not committed, or they differ in arithmetic, size, steps or text.
    """
    if changed := [each["run"] for each in trainings if (each["environment"]["commit"] or CHANGED).endswith(CHANGED)]:
        raise UsageError(f"sources differed from their commit, so these are no results: {', '.join(changed)}")
    for what, of in ((what, of) for what, of in _SAME.items() if what not in apart_from):
        found = {of(each): each["run"] for each in trainings if of(each) is not None}
        if len(found) > 1:
            listed = ", ".join(f"{value} ({run})" for value, run in found.items())
            raise UsageError(f"trainings that differ in {what} are not compared: {listed}")


def bits_won(scheme: str, text: str = "books", among: str = "kl") -> Measure:
    """Measure of a comparison: bits that the first model may do with less for the same KL, averaged over passages."""
    return lambda diff, plain: advantage(fmean(diff[text][among][scheme]), fmean(plain[text][among][scheme]))


def range_won(diff: Result, plain: Result) -> float:
    """Bits that a smaller range wins at the primary scheme, as the simple model of `figure8_model` says."""
    return parts_won(diff["books"], plain["books"], PRIMARY)[0]


def sensitivity_won(diff: Result, plain: Result) -> float:
    """Bits that a smaller sensitivity wins, likewise."""
    return parts_won(diff["books"], plain["books"], PRIMARY)[1]


def won_by_steps(step: int, wider: int) -> Measure:
    """Measure the bits won where the first model's logits are rounded to one step and the other's to another."""
    return lambda diff, plain: advantage(
        fmean(diff["books"]["kl_of_steps"][str(step)]), fmean(plain["books"]["kl_of_steps"][str(wider)])
    )


def won_at_ratio(ratio: int) -> Measure:
    """Measure the bits won if the Transformer's logits ranged `ratio` times as far as the DIFF model's, in every layer.

    Args:
        ratio: one of `RATIOS`.
    """
    return won_by_steps(1, ratio)


def break_even(diff: Result, plain: Result) -> float:
    """Find the ratio of ranges at which neither model wins bits, as its binary logarithm.

    Bits won are taken as straight between the ratios that were measured, over their binary logarithms, and go on
    straight beyond them.
    """
    won = [won_at_ratio(ratio)(diff, plain) for ratio in RATIOS]
    # RATIOS double, so places in the list are binary logarithms.
    before = next((place for place in range(len(won) - 1) if won[place + 1] >= 0), len(won) - 2)
    return before - won[before] / (won[before + 1] - won[before])


def perplexity_ratio(diff: Result, plain: Result) -> float:
    """Perplexity on the held-out training text over the other model's."""
    return math.exp(diff["validation"]["nll"] - plain["validation"]["nll"])


def largest_logit_ratio(diff: Result, plain: Result) -> float:
    """Largest logit, of both maps of all layers, over the other model's."""
    top, other = (each["outliers"]["overall"]["logits"]["top"]["1"] for each in (diff, plain))
    return float(top / other)


# What is measured beside all schemes, and of controls.
PARTS: dict[str, Measure] = {
    "4:tensor, from the range": range_won,
    "4:tensor, from the sensitivity": sensitivity_won,
    **{f"logits in steps of {step}": bits_won(step, among="kl_of_steps") for step in ("1", "2", "4", "8")},
    **{f"queries and keys, {s}": bits_won(s, among="kl_of_qk") for s in ("4:tensor", "4:head", "4:row")},
    **{f"web, {s}": bits_won(s, "web") for s in (PRIMARY, "4:row", "4:row:shift")},
    "perplexity over the Transformer's": perplexity_ratio,
}
OF_CONTROLS: dict[str, Measure] = {
    "bits won at `4:tensor`": bits_won(PRIMARY),
    "range": range_won,
    "sensitivity": sensitivity_won,
    "perplexity": perplexity_ratio,
}
OF_SIZE = OF_CONTROLS | {"largest logit over the Transformer's": largest_logit_ratio}
# Parameters of the models that a line through the sizes is read at: SmolLM2's, and the paper's.
FAR = {"135 million": 135e6, "3 billion": 3e9}
MAIN = [Comparison(kind) for kind in DIFFS]
CONTROLS = [
    *(Comparison(kind, seeds=THREE) for kind in ("half-heads", "gated")),
    *(Comparison(kind + EQUALIZED, "transformer" + EQUALIZED, seeds=THREE) for kind in DIFFS),
]
LONGER = [Comparison(kind, experiment="e2", seeds=THREE) for kind in DIFFS]
LARGER = [replace(comparison, experiment="e3") for comparison in LONGER]
ON_PURPOSE = [Comparison(kind + OUTLIERS, "transformer" + OUTLIERS, seeds=THREE) for kind in DIFFS]


def p_value(differences: Sequence[float]) -> float:
    """Two-sided p of Student's t test that the mean is zero."""
    from scipy.stats import ttest_1samp

    return float(ttest_1samp(differences, 0.0).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted by Holm's method, in the order they came.

    Source: Holm, "A Simple Sequentially Rejective Multiple Test Procedure", Scand. J. Statistics 6 (1979).
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for place, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def verdict(mean: float, p: float) -> str:
    """Verdict of a primary comparison whose p has been adjusted."""
    return "undecided" if p >= LEVEL else "DIFF wins" if mean > 0 else "DIFF loses"


def summary(there: Mapping[str, Result]) -> str:
    """Everything in Markdown."""
    sections = {
        "Rates": _rates(there),
        "Primary: bits won at 4:tensor on books, seeds 101 to 106": _primary(there),
        "Secondary: 36 schemes, Holm over 72": _secondary(there),
        "Secondary: parts, fixed steps, operands, the other text, perplexity": _parts(there),
        "Bits won if the Transformer's logits ranged r times as far": _ratios(there),
        "Arithmetic": _arithmetic(there),
        "Controls, E2 and E3: bits won at 4:tensor, three seeds": _others(there),
        "E2: formats and softmax weights, bits won, three seeds": _formats(there),
        "E3: rates, by held-out perplexity at 8 million tokens": _checks(there),
        "E3: a line through E1 and E3, by the logarithm of parameters": _direction(there),
        "E3: KL of KV caches in 0.001 nats, three seeds": _caches(there),
        "Outliers, means over seeds": _outliers(there),
        "Outliers by layer: top 1, 10 and median, means over seeds": _outliers_by_layer(there),
        "Outliers on purpose: bits won on books, three seeds": _on_purpose(there),
    }
    return "\n\n".join(f"## {title}\n\n" + "\n".join(lines) for title, lines in sections.items())


def _rates(there: Mapping[str, Result]) -> list[str]:
    rates, lines = sorted({*GRID, *EDGES.values()}), []
    check_alike([result for name, result in there.items() if "-rate-" in name])
    for kind in KINDS:
        found = [there.get(grid_name(kind, rate), {}).get("validation") for rate in rates]
        shown = ["" if each is None else f"{each['perplexity'] or math.inf:.2f}" for each in found]
        lines.append([kind, *shown, str(best_rate(kind, there) or "not decided yet")])
    return markdown(["held-out perplexity", *map(str, rates), "chosen"], lines)


def _primary(there: Mapping[str, Result]) -> list[str]:
    found = [comparison.values(there, bits_won(PRIMARY)) for comparison in MAIN]
    if not _are_complete(there):
        count = sum(f"e1-{kind}-seed-{seed}" in there for kind in KINDS for seed in SIX)
        lines = [f"{count} of 18 trainings are there: no interval and no verdict before all of them.", ""]
        return lines + markdown(["", "by seed"], [[c.kind, _signed(v)] for c, v in zip(MAIN, found, strict=True)])
    rows = [
        [c.kind, str(len(values)), _signed(values), _interval(values), f"{p:.2g}", verdict(fmean(values), p)]
        for c, values, p in zip(MAIN, found, holm([p_value(values) for values in found]), strict=True)
    ]
    return markdown(["", "trainings", "by seed", "mean", "p, Holm", "verdict"], rows)


def _secondary(there: Mapping[str, Result]) -> list[str]:
    if not _are_complete(there):
        return ["Not before the primary ones."]
    found = {(s, c.kind): c.values(there, bits_won(s)) for s in SCHEMES for c in MAIN}
    adjusted = holm([p_value(values) for values in found.values()])
    cells = {at: [_interval(v), f"{p:.2g}"] for (at, v), p in zip(found.items(), adjusted, strict=True)}
    rows = [[f"`{s}`", *(text for kind in DIFFS for text in cells[s, kind])] for s in SCHEMES]
    return markdown(["scheme", *(head for kind in DIFFS for head in (f"{kind}, bits won", "p, Holm"))], rows)


def _parts(there: Mapping[str, Result]) -> list[str]:
    return markdown(["", *DIFFS], [[name, *(_over(there, c, m) for c in MAIN)] for name, m in PARTS.items()])


def _ratios(there: Mapping[str, Result]) -> list[str]:
    rows = []
    for c in (*MAIN, *LONGER, *LARGER):
        level = c.values(there, break_even)
        if not c.is_complete(there) or not level:
            rows.append([f"{c.kind} of {c.experiment}", "not yet", *[""] * len(RATIOS)])
            continue
        row = [_over(there, c, won_at_ratio(ratio)) for ratio in RATIOS]
        rows.append([f"{c.kind} of {c.experiment}", *row, shown(as_ratio(level)).replace("+", "")])
    return markdown(["", *(f"r = {ratio}" for ratio in RATIOS), "break-even r"], rows)


def as_ratio(logarithms: Sequence[float]) -> Difference:
    """Turn binary logarithms of ratios into their geometric mean with Student's 95 % interval."""
    mean = mean_interval(logarithms)
    return Difference(2**mean.mean, 2**mean.low, 2**mean.high)


def _arithmetic(there: Mapping[str, Result]) -> list[str]:
    rows = []
    for c in MAIN:
        ours, theirs = (replace(c, experiment=name, seeds=(101,)) for name in ("e1", "arithmetic"))
        moved = [b - a for a, b in zip(*(x.values(there, bits_won(PRIMARY)) for x in (ours, theirs)), strict=False)]
        if not moved or not c.is_complete(there):
            rows.append([c.kind, "not yet", "", ""])
            continue
        limit = 2 * stdev(c.values(there, bits_won(PRIMARY)))
        holds = "does not matter" if abs(moved[0]) <= limit else "matters: E1 is to be repeated in float32"
        rows.append([c.kind, f"{moved[0]:+.2f}", f"{limit:.2f}", holds])
    return markdown(["", "float32 − bf16, bits won of seed 101", "limit", "the arithmetic"], rows)


def _others(there: Mapping[str, Result]) -> list[str]:
    rows = [
        [f"{c.experiment}: {c.kind} − {c.base}", *(_over(there, c, measure) for measure in OF_CONTROLS.values())]
        for c in (*CONTROLS, *LONGER, *LARGER)
    ]
    return markdown(["", *OF_CONTROLS], rows)


def _formats(there: Mapping[str, Result]) -> list[str]:
    measures = {name: bits_won(name, among="kl_of_formats") for name in FORMATS}
    return markdown(["", *DIFFS], [[name, *(_over(there, c, m) for c in LONGER)] for name, m in measures.items()])


def _checks(there: Mapping[str, Result]) -> list[str]:
    rows = []
    for kind in KINDS:
        found = [there.get(f"e3-{kind}-check{name}") for name in CHECKS.values()]
        check_alike([each for each in found if each])
        shown = [each and f"{each['validation']['perplexity'] or math.inf:.2f} ({each['rate']:g})" for each in found]
        rows.append([kind, *(text or "" for text in shown)])
    return markdown(["held-out perplexity (rate)", *(f"{factor:g} times" for factor in CHECKS)], rows)


def _direction(there: Mapping[str, Result]) -> list[str]:
    rows = []
    for small, large in zip(MAIN, LARGER, strict=True):
        if not (small.is_complete(there) and large.is_complete(there)):
            rows.append([small.kind, "not yet", *[""] * (3 + len(FAR))])
            continue
        names = [[name for pair in comparison.names for name in pair] for comparison in (small, large)]
        check_alike([there[name] for of_size in names for name in of_size], apart_from=("size", "steps"))
        sizes = [there[of_size[0]]["parameters"] for of_size in names]
        for name, measure in OF_SIZE.items():
            before, after = (comparison.values(there, measure) for comparison in (small, large))
            row = [small.kind, name, *(_over(there, comparison, measure) for comparison in (small, large))]
            if min(len(before), len(after)) < 2:
                rows.append([*row, "too many diverged", *[""] * len(FAR)])
                continue
            tenfold = moved(before, after, math.log10(sizes[1] / sizes[0]))
            read = [along(before, after, place_of(far, *sizes)) for far in FAR.values()]
            rows.append([*row, *map(shown, (tenfold, *read))])
    heads = ["E1, six trainings", "E3, three trainings", "moved by ten times the parameters"]
    return markdown(["", "", *heads, *(f"at {name}" for name in FAR)], rows)


def _caches(there: Mapping[str, Result]) -> list[str]:
    rows = []
    for kind in KINDS:
        names = [f"e3-{kind}-seed-{seed}" for seed in THREE]
        found = [there[name]["caches"] for name in names if "caches" in there.get(name, {})]
        if len(found) < len(names):
            rows.append([kind, f"{len(found)} of {len(names)}", "", "", ""])
            continue
        for cache, row in found[0]["rows"].items():
            share = row["bytes_long"] / found[0]["bytes_long_at_16_bits"]
            of_texts = ([1000 * each["rows"][cache][text]["kl"] for each in found] for text in TEXTS)
            rows.append([kind, f"`{cache}`", f"{share:.1%}", *map(_interval, of_texts)])
    return markdown(["", "keys, values", f"of 16 bits in {LONG:,} tokens", *TEXTS], rows)


def _outliers(there: Mapping[str, Result]) -> list[str]:
    rows = [
        [group, str(len(found)), *_magnitudes([each["overall"] for each in found])]
        for group, found in _outliers_of_groups(there).items()
    ]
    return markdown(["", "trainings", *_MAGNITUDES], rows)


def _outliers_by_layer(there: Mapping[str, Result]) -> list[str]:
    rows = [
        [group, str(layer + 1), *_magnitudes(across)]
        for group, found in _outliers_of_groups(there).items()
        if group.removeprefix("e3-") in KINDS or group.removeprefix("e1-") in KINDS
        for layer, across in enumerate(zip(*(each["layers"] for each in found), strict=True))
    ]
    return markdown(["", "layer", *_MAGNITUDES], rows)


_MAGNITUDES = [f"{kind}, {rank}" for kind in ("logits", "hidden") for rank in ("top 1", "top 10", "median")]


def _outliers_of_groups(there: Mapping[str, Result]) -> dict[str, list[dict[str, Any]]]:
    """Outliers of every training that has a seed, by the name without it."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, result in there.items():
        group, has_seed, _ = name.partition("-seed-")
        if has_seed and "overall" in result.get("outliers", {}):
            groups.setdefault(group, []).append(result["outliers"])
    return groups


def _magnitudes(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Means over trainings of logits' and hidden states' largest, tenth largest and median."""
    each = [
        [value for of in (one["logits"], one["hidden"]) for value in (of["top"]["1"], of["top"]["10"], of["median"])]
        for one in found
    ]
    return [f"{fmean(column):.3g}" for column in zip(*each, strict=True)]


def _on_purpose(there: Mapping[str, Result]) -> list[str]:
    schemes = [f"{bits}:{shared}" for shared in ("tensor", "row", "row:shift") for bits in BITS]
    measures: dict[str, Measure] = {scheme: bits_won(scheme) for scheme in schemes}
    measures |= {f"steps of {step}": bits_won(step, among="kl_of_steps") for step in ("1", "2", "4", "8")}
    measures |= {"largest logit over the Transformer's": largest_logit_ratio}
    measures |= {"perplexity over the Transformer's": perplexity_ratio}
    rows = [[name, *(_over(there, c, m) for c in ON_PURPOSE)] for name, m in measures.items()]
    return markdown(["", *(c.kind for c in ON_PURPOSE)], rows)


def _are_complete(there: Mapping[str, Result]) -> bool:
    return all(comparison.is_complete(there) for comparison in MAIN)


def _over(there: Mapping[str, Result], comparison: Comparison, measure: Measure) -> str:
    values, wanted = comparison.values(there, measure), len(comparison.seeds)
    is_complete = comparison.is_complete(there)
    said = _interval(values) if is_complete and values else _signed(values)
    if len(values) == wanted:
        return said
    # Some are not there yet or, if the comparison is complete, diverged.
    return f"{said} ({len(values)} of {wanted})".lstrip() if values or is_complete else ""


def _signed(values: Sequence[float]) -> str:
    return " ".join(f"{value:+.2f}" for value in values)


def _interval(values: Sequence[float]) -> str:
    return shown(mean_interval(values))


def shown(mean: Difference) -> str:
    """Write a mean with its interval."""
    return f"{mean.mean:+.2f} [{mean.low:+.2f}, {mean.high:+.2f}]"


def main(
    folder: Annotated[Path, typer.Argument(help="Folder of raw files.")] = RESULTS,
) -> None:
    """Compare what the raw files hold."""
    print(summary(results(folder)))


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
