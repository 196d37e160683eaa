"""The simple model of Figure 8, a range times a sensitivity, and what measured results say beside it.

Results are what `figure8` stores of a model. A passage's windows count as one observation, and Student's t
gives the intervals.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from diffquant.measure.stats import Difference, mean_interval, paired_difference


def predicted(result: Mapping[str, Any], scheme: str) -> float:
    """KL that the simple model predicts, in nats."""
    kl: float = sum(
        cost * size
        for layer in result["layers"]
        for cost, size in zip(costs(layer["sensitivity"], scheme), layer["errors"][scheme]["variance"], strict=True)
    )
    return kl


def costs(sensitivity: Mapping[str, float], scheme: str) -> list[float]:
    """Costs, in KL a unit of variance, of what a scheme rounds: the map, both maps, or their mean and half difference.

    KL is a quadratic form in the noise of both maps, which noise on each and on both determines: noise of
    opposite signs costs twice the sum of each less what the same noise on both does.
    """
    if len(sensitivity) == 1:
        return [sensitivity["first"]]
    apart = [sensitivity["first"], sensitivity["second"]]
    return [sensitivity["both"], 2 * sum(apart) - sensitivity["both"]] if scheme.endswith("alike") else apart


def advantage(diff: float, transformer: float) -> float:
    """Advantage in bits, which DIFF may do with less: one bit fewer is a scale twice as large and four times the KL."""
    return math.log2(transformer / diff) / 2


def parts(result: Mapping[str, Any], scheme: str) -> tuple[float, float]:
    """Factors of the simple model's KL: mean square of the error, as it weighs, and KL a unit of its variance."""
    cost = sum(sum(costs(layer["sensitivity"], scheme)) for layer in result["layers"])
    return predicted(result, scheme) / cost, cost


def by_passage(result: Mapping[str, Any], values: Sequence[float]) -> list[float]:
    """Values of sequences as means over each passage; of needles, or of one passage, as they are."""
    return passage_means(values, result["reading"].get("windows", 1))


def passage_means(values: Sequence[float], windows: int) -> list[float]:
    """Values of sequences as means over each passage of so many."""
    return [sum(values[first : first + windows]) / windows for first in range(0, len(values), windows)]


def mean_kl(result: Mapping[str, Any], scheme: str) -> Difference:
    """Mean KL of a scheme over passages with its interval, in nats."""
    return mean_interval(by_passage(result, result["kl"][scheme]))


def bits_won(diff: Mapping[str, Any], plain: Mapping[str, Any], scheme: str) -> float:
    """Bits that DIFF may do with less than the Transformer for the same KL."""
    return advantage(mean_kl(diff, scheme).mean, mean_kl(plain, scheme).mean)


def parts_won(diff: Mapping[str, Any], plain: Mapping[str, Any], scheme: str) -> tuple[float, float]:
    """Bits that the simple model says a smaller range and a smaller sensitivity win, in this order."""
    (size, cost), (plain_size, plain_cost) = parts(diff, scheme), parts(plain, scheme)
    return advantage(size, plain_size), advantage(cost, plain_cost)


def advantage_by_book(diff: Mapping[str, Any], plain: Mapping[str, Any], scheme: str) -> list[float]:
    """Bits that DIFF may do with less on each book of the text; none where the books are not known."""
    books = diff["reading"].get("books", 0)
    kl, plain_kl = (by_passage(result, result["kl"][scheme]) for result in (diff, plain))
    return [advantage(sum(kl[book::books]), sum(plain_kl[book::books])) for book in range(books)]


def figure8_summary(results: Sequence[Mapping[str, Any]]) -> str:
    """Text with every scheme's KL, measured and predicted, and each DIFF against the Transformer, if one is there."""
    lines = []
    for result in results:
        nll = sum(result["nll"]) / len(result["nll"])
        lines.append(f"{result['model']} ({result['generation']}), {nll:.3f} nats a token at 16 bits")
        lines += [f"  {scheme:<15} {_kl_text(result, scheme)}" for scheme in result["kl"]]
    plain = next((result for result in results if result["generation"] == "Transformer"), None)
    for result in results:
        if plain is not None and result is not plain:
            lines += [
                f"{result['model']} against {plain['model']}, bits it may do with less:",
                *_against(result, plain),
            ]
    return "\n".join(lines)


def _kl_text(result: Mapping[str, Any], scheme: str) -> str:
    """A scheme's KL; where needles make it, the median too, since a few contexts make the mean."""
    kl, guess = mean_kl(result, scheme), predicted(result, scheme)
    values = result["kl"][scheme]
    typical = f"  median {median(values):.2g}" if "needles" in result["reading"] else ""
    return f"{kl.mean:.2g} [{kl.low:.2g}, {kl.high:.2g}]{typical}  predicted {guess:.2g}, × {kl.mean / guess:.3g}"


def _against(diff: Mapping[str, Any], plain: Mapping[str, Any]) -> list[str]:
    lines = []
    for scheme in diff["kl"]:
        change = paired_difference(*(by_passage(result, result["kl"][scheme]) for result in (diff, plain)))
        size, cost = parts_won(diff, plain, scheme)
        books = " ".join(f"{bits:+.2f}" for bits in advantage_by_book(diff, plain, scheme))
        lines.append(
            f"  {scheme:<15} {bits_won(diff, plain, scheme):+.2f}  predicted {size + cost:+.2f}"
            f" = range {size:+.2f} and sensitivity {cost:+.2f};"
            f" KL {change.mean:+.2g} [{change.low:+.2g}, {change.high:+.2g}]" + (f"; by book {books}" if books else "")
        )
    return lines
