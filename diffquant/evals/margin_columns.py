"""Columns of a task that chooses among endings: sensitive measures of change from 16 bits, and the accuracy.

KL is never negative, so its effects do not cancel over items and few items show a change; it does not say whether the
model became worse. An item's margin is the log-probability per character of its right ending minus that of the
likeliest wrong one: it has a sign, and changes even when the choice does not.
"""

from collections.abc import Sequence
from dataclasses import replace

from diffquant.evals.columns import ITEMS, POINTS, Column, Compared, Metric, bounded, kl_text
from diffquant.evals.stats import Difference, mean_interval
from diffquant.evals.task_result import TaskResult
from diffquant.support.plain_data import JsonObject

# About the length of an ending.
_CHARACTERS = 100


def _margin(compared: Compared) -> Difference | None:
    """Mean change of the items' margins, in nats per 100 characters."""
    results = [result for result in compared if result is not None]
    margins = [result.details["margins"] for result in results if "margins" in result.details]
    if len(margins) < 2:
        return None
    return mean_interval([_CHARACTERS * (now - before) for now, before in zip(*margins, strict=True)])


def _kl(compared: Compared) -> Difference | None:
    """Mean KL over the tokens of right endings, in nats, with its interval over items."""
    details = compared.result.details if compared.result else {}
    return mean_interval(details["kl_by_item"], details["tokens_by_item"]) if "kl_by_item" in details else None


MARGIN = Metric(
    f"change of the margin,\nnats per {_CHARACTERS} characters",
    _margin,
    lambda change: f"margin {bounded(change, '+.2f')} nats per {_CHARACTERS} characters",
)
KL = Metric("KL from 16 bits, nats", _kl, lambda change: f"KL {kl_text(change)}", is_log=True)


def _record(compared: Compared) -> JsonObject:
    margin, kl = _margin(compared), _kl(compared)
    return {
        "margin": compared.result.details.get("margin") if compared.result else None,
        "margin_change": margin.mean / _CHARACTERS if margin else None,
        "margin_change_low": margin.low / _CHARACTERS if margin else None,
        "margin_change_high": margin.high / _CHARACTERS if margin else None,
        "kl": kl.mean if kl else None,
        "kl_low": kl.low if kl else None,
        "kl_high": kl.high if kl else None,
        **ITEMS.record(compared),
    }


def _notes(results: Sequence[TaskResult]) -> list[str]:
    if not any("margins" in result.details for result in results):
        return ITEMS.notes(results)
    return [
        "KL is the mean of KL(16 bits || quantized) over the tokens of right endings, in nats. The margin is how "
        "much likelier an item's right ending is than its likeliest wrong one; the table has its mean change from "
        f"16 bits, in nats per {_CHARACTERS} characters.",
        *ITEMS.notes(results),
    ]


# Results older than margins have only the score.
MARGINS = replace(
    ITEMS,
    table=(
        Column("KL [95 %]", lambda compared: kl_text(_kl(compared)), needs="margins"),
        Column("margin [95 %]", lambda compared: bounded(_margin(compared), "+.2f"), needs="margins"),
        *ITEMS.table,
    ),
    changes=(KL, MARGIN, POINTS),
    record=_record,
    notes=_notes,
    named_alone=False,
)
