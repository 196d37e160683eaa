"""Columns of accuracy over orders of demonstrations, and of the gap between best and worst. No torch here."""

from collections.abc import Sequence
from dataclasses import replace

from diffquant.measure.results import ITEMS, MISSING, Metric, TaskResult
from diffquant.support.plain_data import JsonObject


def _spread_text(result: TaskResult | None, _: object) -> str:
    return MISSING if result is None else f"{100 * result.details['spread']:.1f}"


def _record(result: TaskResult | None, baseline: TaskResult | None) -> JsonObject:
    details = result.details if result else {}
    return ITEMS.record(result, baseline) | {name: details.get(name) for name in ("best", "worst", "spread")}


def _notes(results: Sequence[TaskResult]) -> list[str]:
    told = "best - worst is between orders of the same demonstrations, in points of accuracy."
    return [*ITEMS.notes(results), *([told] if results else [])]


# Accuracy over all orders, and the gap between the best and the worst order.
ORDERS = replace(ITEMS, metrics=(*ITEMS.metrics, Metric("best - worst", _spread_text)), record=_record, notes=_notes)
