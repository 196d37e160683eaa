"""Columns of a task that chooses among endings: what resolves a change from 16 bits, and beside it the accuracy.

KL is never negative, so what rounding moves in one item it does not move back in the next, and few items show it; it
does not say whether the model became worse. An item's margin is by how much its right ending is likelier than the
likeliest wrong one, per character: it has a sign, and moves also where the choice does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from diffquant.evals.columns import MISSING, POINTS, Change, Compared, Drawn, ItemColumns, kl_text
from diffquant.evals.stats import mean_interval
from diffquant.evals.task_result import TaskResult
from diffquant.support.plain_data import JsonObject

# About the length of an ending.
_CHARACTERS = 100


def _margin(compared: Compared) -> Drawn | None:
    """Mean change of the items' margins, in nats per 100 characters."""
    results = [result for result in compared if result is not None]
    margins = [result.details["margins"] for result in results if "margins" in result.details]
    if len(margins) < 2:
        return None
    return Drawn(*_interval([_CHARACTERS * (now - before) for now, before in zip(*margins, strict=True)]))


def _kl(compared: Compared) -> Drawn | None:
    """Mean KL over the tokens of right endings, in nats, with its interval over items."""
    details = compared.result.details if compared.result else {}
    if "kl_by_item" not in details:
        return None
    return Drawn(*_interval(details["kl_by_item"], details["tokens_by_item"]))


def _margin_text(change: Drawn) -> str:
    return f"margin {_signed_text(change)} nats per {_CHARACTERS} characters"


MARGIN = Change(
    f"change of the margin,\nnats per {_CHARACTERS} characters", is_log=False, of=_margin, text=_margin_text
)
KL = Change("KL from 16 bits, nats", is_log=True, of=_kl, text=kl_text)


@dataclass(frozen=True)
class MarginColumns(ItemColumns):
    """Columns of KL and margin before those of the score; results of before there were margins have the score alone."""

    changes: ClassVar[Sequence[Change]] = (KL, MARGIN, POINTS)

    def heads(self, task: str, results: Sequence[TaskResult], alone: bool) -> list[str]:
        heads = super().heads(task, results, alone)
        return ["KL [95 %]", "margin [95 %]", *heads] if _have_margins(results) else heads

    def texts(self, compared: Compared, results: Sequence[TaskResult]) -> list[str]:
        texts = super().texts(compared, results)
        if not _have_margins(results):
            return texts
        kl, margin = _kl(compared), _margin(compared)
        told = [kl_text(kl).removeprefix("KL ") if kl else MISSING, _signed_text(margin) if margin else MISSING]
        return [*told, *texts]

    def record(self, task: str, compared: Compared) -> JsonObject:
        margin, kl = _margin(compared), _kl(compared)
        numbers = {
            "margin": compared.result.details.get("margin") if compared.result else None,
            "margin_change": margin.value / _CHARACTERS if margin else None,
            "margin_change_low": margin.low / _CHARACTERS if margin else None,
            "margin_change_high": margin.high / _CHARACTERS if margin else None,
            "kl": kl.value if kl else None,
            "kl_low": kl.low if kl else None,
            "kl_high": kl.high if kl else None,
        }
        return {f"{task} {name}": value for name, value in numbers.items()} | super().record(task, compared)

    def notes(self, results: Sequence[TaskResult]) -> list[str]:
        if not _have_margins(results):
            return super().notes(results)
        return [
            "KL is the mean of KL(16 bits || quantized) over the tokens of right endings, in nats. The margin is how "
            "much likelier an item's right ending is than its likeliest wrong one; the table has its mean change from "
            f"16 bits, in nats per {_CHARACTERS} characters.",
            *super().notes(results),
        ]


def _have_margins(results: Sequence[TaskResult]) -> bool:
    return any("margins" in result.details for result in results)


def _interval(values: Sequence[float], weights: Sequence[float] | None = None) -> tuple[float, float, float]:
    interval = mean_interval(values, weights)
    return interval.mean, interval.low, interval.high


def _signed_text(change: Drawn) -> str:
    return f"{change.value:+.2f} [{change.low:+.2f}, {change.high:+.2f}]"
