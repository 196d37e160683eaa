"""Figures of roundings on the amounts of text that their makers advise."""

from collections.abc import Sequence
from typing import Any

from diffquant.measure.stats import Difference
from research.pages.raw import raw
from research.pages.render import fixed, interval, table
from research.pages.weights import FILES, TRAINED
from research.studies.kv_results import kl_change
from research.studies.rounding_amounts import AUTO_ROUND, LLM_COMPRESSOR, LONG_STEPS, MORE, OURS, name_of

RESULTS = {model: raw(f"amounts/{FILES[model]}.json")["results"] for model in TRAINED}
TEXTS = ("prose", "elsewhere", "further")
FORMER, GPTQ = name_of("tuned", OURS), name_of("gptq", OURS)
TUNED, LONG_TUNED, LONG_GPTQ = name_of("tuned", MORE), name_of("tuned", AUTO_ROUND), name_of("gptq", AUTO_ROUND)
# AutoRound on its default, with 8 and with 64 windows a step: whichever has less KL in a cell is compared.
STEPS = (name_of("AutoRound", AUTO_ROUND), name_of(LONG_STEPS, AUTO_ROUND))
GUIDED, LONG_GUIDED = (name_of("llm-compressor GPTQ", tokens) for tokens in (LLM_COMPRESSOR, AUTO_ROUND))


def score(model: str, method: str, text: str) -> dict[str, Any]:
    """KL of a method on a text, with its windows."""
    found: dict[str, Any] = RESULTS[model][method]
    return found if text == "prose" else found[text]


def best_score(model: str, methods: Sequence[str], text: str) -> dict[str, Any]:
    """Least KL of several methods on a text, with its windows."""
    return min((score(model, each, text) for each in methods), key=lambda scores: float(scores["kl"]))


def differences(ours: str, *others: str) -> dict[tuple[str, str], Difference]:
    """KL of one row minus the least of others' over the same windows, by model and text, where all were run."""
    return {
        (model, text): kl_change(score(model, ours, text), best_score(model, others, text))
        for model, rows in RESULTS.items()
        for text in TEXTS
        if {ours, *others} <= rows.keys()
    }


def less(ours: str, other: str, texts: Sequence[str] = TEXTS) -> list[float]:
    """Shares of KL that one row has less than another, by model and text."""
    return [
        1 - score(model, ours, text)["kl"] / score(model, other, text)["kl"]
        for model, text in differences(ours, other)
        if text in texts
    ]


def more(ours: str, other: str) -> list[float]:
    """Shares of KL that one row has more than another, by model and text."""
    return [
        score(model, ours, text)["kl"] / score(model, other, text)["kl"] - 1 for model, text in differences(ours, other)
    ]


ONE_ROSE = [place for place, each in differences(TUNED, FORMER).items() if each.low > 0] == [("Transformer", "further")]


def leads(ours: str, other: str) -> bool:
    """Whether one row has less KL than another wherever both were run, and no interval contains zero."""
    return all(each.high < 0 for each in differences(ours, other).values())


def count(ours: str, *others: str) -> str:
    """Number of models and texts on which one row's KL is lower than all others', and higher, by the intervals."""
    found = differences(ours, *others).values()
    lower, higher = sum(each.high < 0 for each in found), sum(each.low > 0 for each in found)
    return f"lower KL in {lower} of {len(found)}, higher in {higher}"


def count_at(width: str) -> str:
    """`count` of `tuned` on its default and AutoRound on its own, at another width."""
    return count(name_of(f"tuned {width}", MORE), name_of(f"AutoRound {width}", AUTO_ROUND))


def seconds(method: str) -> str:
    """A row's CPU seconds on DIFF V1."""
    return fixed(RESULTS["DIFF V1"][method]["cpu_seconds"], 0)


def times(ours: str, other: str) -> list[float]:
    """One row's CPU seconds as multiples of another's, by model."""
    both = [rows for rows in RESULTS.values() if {ours, other} <= rows.keys()]
    return [rows[ours]["cpu_seconds"] / rows[other]["cpu_seconds"] for rows in both]


def mostly_leads(ours: str, *others: str) -> bool:
    """Whether one row's KL is lower than all others', by the intervals, on most models and texts."""
    found = differences(ours, *others).values()
    return 2 * sum(each.high < 0 for each in found) > len(found)


def pairs_table() -> str:
    """KL in nats of AutoRound, and of ours minus it, by model and text."""
    ours = {f"`{rule}` − AutoRound": differences(rule, *STEPS) for rule in (TUNED, LONG_TUNED)}
    rows = [
        [
            f"{model}, {text}",
            fixed(best_score(model, STEPS, text)["kl"], 4),
            *(interval(found[model, text], 4, True) for found in ours.values()),
        ]
        for model in RESULTS
        for text in TEXTS
    ]
    return table(["KL, nats", STEPS[0], *ours], rows)
