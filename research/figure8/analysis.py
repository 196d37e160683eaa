"""The raw files of E1 to E3, compared as protocol.md lays down.

    python -m research.figure8.analysis [FOLDER]

Prints Markdown: how many trainings there are, each kind's rate, the comparisons with intervals over trainings, and the
controls. Before a comparison has all its trainings, it has no interval and no verdict.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import typer

from diffquant.reports.tables import markdown
from research.figure8.comparisons import (
    CONTROLS,
    DIFFS,
    FAR,
    LARGER,
    LONGER,
    MAIN,
    OF_CONTROLS,
    OF_SIZE,
    ON_PURPOSE,
    PARTS,
    PRIMARY,
    RATIOS,
    SIX,
    THREE,
    Comparison,
    Measure,
    as_ratio,
    bits_won,
    break_even,
    check_alike,
    largest_logit_ratio,
    perplexity_ratio,
    won_at_ratio,
)
from research.figure8.deciding import DIFF_VERDICTS, against_zero, holm, interval, p_value, section, shown, verdicts
from research.figure8.direction import along, moved, place_of
from research.figure8.plan import CHECKS, EDGES, GRID, KINDS, RESULTS, Result, best_rate, grid_name, results
from research.figure8.scoring import BITS, FORMATS, SCHEMES
from research.studies.kv_decoded import LONG
from research.studies.kv_results import TEXTS


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
    return "\n\n".join(section(title, lines) for title, lines in sections.items())


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
    decisions = verdicts({c.kind: against_zero(values) for c, values in zip(MAIN, found, strict=True)}, DIFF_VERDICTS)
    rows = [
        [kind, str(len(values)), _signed(values), shown(mean), f"{p:.2g}", said]
        for values, (kind, (mean, p, said)) in zip(found, decisions.items(), strict=True)
    ]
    return markdown(["", "trainings", "by seed", "mean", "p, Holm", "verdict"], rows)


def _secondary(there: Mapping[str, Result]) -> list[str]:
    if not _are_complete(there):
        return ["Not before the primary ones."]
    found = {(s, c.kind): c.values(there, bits_won(s)) for s in SCHEMES for c in MAIN}
    adjusted = holm([p_value(values) for values in found.values()])
    cells = {at: [interval(v), f"{p:.2g}"] for (at, v), p in zip(found.items(), adjusted, strict=True)}
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
            rows.append([kind, f"`{cache}`", f"{share:.1%}", *map(interval, of_texts)])
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
    said = interval(values) if is_complete and values else _signed(values)
    if len(values) == wanted:
        return said
    # Some are not there yet or, if the comparison is complete, diverged.
    return f"{said} ({len(values)} of {wanted})".lstrip() if values or is_complete else ""


def _signed(values: Sequence[float]) -> str:
    return " ".join(f"{value:+.2f}" for value in values)


def main(
    folder: Annotated[Path, typer.Argument(help="Folder of raw files.")] = RESULTS,
) -> None:
    """Compare what the raw files hold."""
    print(summary(results(folder)))


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
