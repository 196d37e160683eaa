"""The least KL of ours and of other libraries at each number of stored bits."""

import math
from collections.abc import Mapping
from typing import Any

from research.pages import codebooks
from research.pages.render import fixed, table
from research.pages.weights import EIGHT, FILES, OURS, RESULTS, TRAINED
from research.studies.kv_results import kl_change

# Tier and, where a tier has two sizes, words that rows of a level have; those of other levels in the tier are left out.
LEVELS = {
    "3.1": ("3.125 bits", ""),
    "3.5": ("3.5 bits", ""),
    "4.1": ("4.125 bits", ""),
    "4.25": ("4.125 bits", "iq4_xs"),
    "4.5": ("4.5 bits", ""),
    "5.1": ("5.125 bits", ""),
    "6.1": ("6.125 bits", ""),
    "8": ("8 bits", ""),
}
# Of more bits than the rest of their tier.
_LARGER = ("iq4_xs", "q4_k_m", "q5_0", "q5_k")
# SmolLM2's file is on a grid of 4 bits, which this one finds again.
_ON_ITS_GRID = "llama.cpp Q4_K"


def rows(model: str, level: str) -> Mapping[str, dict[str, Any]]:
    """Rows of a level by method, those with rounded inputs left out."""
    tier, words = LEVELS[level]
    found = dict(RESULTS[model]["results"]) | (EIGHT[model] if model in TRAINED else {})
    found |= codebooks.RESULTS[model]["results"]
    return {
        name: each
        for name, each in found.items()
        if each.get("tier") == tier and "elsewhere" in each and "inputs" not in name
        if (words in name.lower() if words else not any(larger in name.lower() for larger in _LARGER))
        if model in TRAINED or not name.startswith(_ON_ITS_GRID)
    }


def least(model: str, level: str, is_ours: bool) -> tuple[str, float]:
    """Method of ours, or of other libraries, with the least KL on text elsewhere, and that KL in nats."""
    found = [
        (name, float(each["elsewhere"]["kl"]))
        for name, each in rows(model, level).items()
        if name.startswith(OURS) == is_ours
    ]
    return min(found, key=lambda each: each[1])


def leads(model: str, level: str) -> bool | None:
    """Whether a method of ours has the least KL of a level; None if the interval of the difference holds zero."""
    ours, other = (rows(model, level)[least(model, level, is_ours)[0]] for is_ours in (True, False))
    change = kl_change(ours["elsewhere"], other["elsewhere"])
    return None if change.low <= 0 <= change.high else change.mean < 0


def places(outcome: bool | None) -> list[tuple[str, str]]:
    """Models and levels at which ours leads, does not, or cannot be told from another."""
    return [
        (model, level) for level in LEVELS for model in FILES if rows(model, level) and leads(model, level) is outcome
    ]


def count() -> int:
    """Number of models and levels at which both were measured."""
    return sum(len(places(outcome)) for outcome in (True, False, None))


def named(outcome: bool | None) -> str:
    """Models and levels of `places` in words."""
    return ", ".join(f"{model} at {level} bits" for model, level in places(outcome))


def levels(model: str, outcome: bool | None) -> str:
    """Levels of `places` for one model in words."""
    *first, last = [level for each, level in places(outcome) if each == model]
    return f"{', '.join(first)} and {last}" if first else last


# Whether `tuned` is ours with the least KL wherever ours leads on SmolLM2.
BY_BEST = all(
    least(model, level, True)[0].startswith("tuned") for model, level in places(True) if model == "SmolLM2-135M"
)


def memory() -> str:
    """Peak memory of our rules on SmolLM2 at 5.1 bits, measured one after the other, from the lowest."""
    found = rows("SmolLM2-135M", "5.1")
    return ", ".join(f"`{rule}` {found[f'{rule} 5:g128']['peak_bytes'] / 2**30:.1f}" for rule in OURS[1:])


def leaders_table() -> str:
    """Least KL of ours and of others by stored bits, on text elsewhere; bold where it is told from the other."""
    made = [[level, *(_cell(model, level) for model in FILES)] for level in LEVELS]
    return table(["bits", *(f"{model}: ours; others" for model in FILES)], made)


def _cell(model: str, level: str) -> str:
    if not rows(model, level):
        return "–"
    cells = [
        f"{_short(name)} {fixed(kl, 2 - math.floor(math.log10(kl)))}"
        for is_ours in (True, False)
        for name, kl in [least(model, level, is_ours)]
    ]
    leading = leads(model, level)
    if leading is not None:
        cells[not leading] = f"**{cells[not leading]}**"
    return "; ".join(cells)


def _short(name: str) -> str:
    """A method's name without its bits and groups."""
    if name.startswith(OURS):
        return name.split(maxsplit=1)[0]
    return name.removeprefix("llama.cpp ").partition(",")[0].removesuffix(" bits").rstrip(" 0123456789")
