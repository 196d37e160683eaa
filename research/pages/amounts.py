"""Figures of roundings on the amounts of text that their makers advise."""

from collections.abc import Sequence
from typing import Any

from diffquant.measure.stats import Difference
from research.pages.raw import folder, raw
from research.pages.render import fixed, interval, table
from research.pages.weights import FILES, TRAINED
from research.studies.kv_results import kl_change
from research.studies.rounding_amounts import AUTO_ROUND, LLM_COMPRESSOR, OURS, name_of

RESULTS = {
    model: raw(f"amounts/{FILES[model]}.json")["results"]
    for model in TRAINED
    if any(folder("amounts").glob(f"{FILES[model]}.json*"))
}
TEXTS = ("prose", "elsewhere", "further")
TUNED, GPTQ = name_of("tuned", OURS), name_of("gptq", OURS)
LONG_TUNED, LONG_GPTQ = name_of("tuned", AUTO_ROUND), name_of("gptq", AUTO_ROUND)
LONG_AUTO_ROUND = name_of("AutoRound", AUTO_ROUND)
GUIDED, LONG_GUIDED = (name_of("llm-compressor GPTQ", tokens) for tokens in (LLM_COMPRESSOR, AUTO_ROUND))
# Ours and another's row, by what the page calls their difference.
PAIRS = {
    "`tuned` on 16,384 − AutoRound": (TUNED, LONG_AUTO_ROUND),
    "`tuned` on 262,144 − AutoRound": (LONG_TUNED, LONG_AUTO_ROUND),
}


def score(model: str, method: str, text: str) -> dict[str, Any]:
    """KL of a method on a text, with its windows."""
    found: dict[str, Any] = RESULTS[model][method]
    return found if text == "prose" else found[text]


def differences(ours: str, other: str) -> dict[tuple[str, str], Difference]:
    """KL of one row minus another's over the same windows, by model and text, where both were run."""
    return {
        (model, text): kl_change(score(model, ours, text), score(model, other, text))
        for model, rows in RESULTS.items()
        for text in TEXTS
        if {ours, other} <= rows.keys()
    }


def less(ours: str, other: str, texts: Sequence[str] = TEXTS) -> list[float]:
    """Shares of KL that one row has less than another, by model and text."""
    return [
        1 - score(model, ours, text)["kl"] / score(model, other, text)["kl"]
        for model, text in differences(ours, other)
        if text in texts
    ]


def leads(ours: str, other: str) -> bool:
    """Whether one row has less KL than another wherever both were run, and no interval contains zero."""
    return all(each.high < 0 for each in differences(ours, other).values())


def count(ours: str, other: str) -> str:
    """Number of models and texts on which one row's KL is lower than another's, and higher, by the intervals."""
    found = differences(ours, other).values()
    lower, higher = sum(each.high < 0 for each in found), sum(each.low > 0 for each in found)
    return f"lower KL in {lower} of {len(found)}, higher in {higher}"


def seconds(method: str) -> str:
    """A row's CPU seconds on DIFF V1."""
    return fixed(RESULTS["DIFF V1"][method]["cpu_seconds"], 0)


def times(ours: str, other: str) -> list[float]:
    """One row's CPU seconds as multiples of another's, by model."""
    both = [rows for rows in RESULTS.values() if {ours, other} <= rows.keys()]
    return [rows[ours]["cpu_seconds"] / rows[other]["cpu_seconds"] for rows in both]


def is_mostly_below(ours: str, other: str) -> bool:
    """Whether the intervals of most models and texts say that one row has less KL than another, and none more."""
    found = differences(ours, other).values()
    return not any(each.low > 0 for each in found) and 2 * sum(each.high < 0 for each in found) > len(found)


def pairs_table() -> str:
    """KL in nats of AutoRound, and of the first minus the second of each pair, by model and text."""
    places = differences(LONG_TUNED, LONG_AUTO_ROUND)
    rows = [
        [
            f"{model}, {text}",
            fixed(score(model, LONG_AUTO_ROUND, text)["kl"], 4),
            *(interval(differences(*pair)[model, text], 4, True) for pair in PAIRS.values()),
        ]
        for model, text in places
    ]
    return table(["KL, nats", LONG_AUTO_ROUND, *PAIRS], rows)
