"""Columns of accuracy over orders of demonstrations, and of the gap between best and worst. No torch here."""

from collections.abc import Sequence
from dataclasses import replace

from diffquant.evals.columns import ITEMS, MISSING, Column, Compared
from diffquant.evals.task_result import TaskResult
from diffquant.support.plain_data import JsonObject


def _spread_text(compared: Compared) -> str:
    return MISSING if compared.result is None else f"{100 * compared.result.details['spread']:.1f}"


def _record(compared: Compared) -> JsonObject:
    details = compared.result.details if compared.result else {}
    return ITEMS.record(compared) | {name: details.get(name) for name in ("best", "worst", "spread")}


def _notes(results: Sequence[TaskResult]) -> list[str]:
    told = "best - worst is between orders of the same demonstrations, in points of accuracy."
    return [*ITEMS.notes(results), *([told] if results else [])]


# Accuracy over all orders, and the gap between the best and the worst order.
ORDERS = replace(ITEMS, table=(*ITEMS.table, Column("best - worst", _spread_text)), record=_record, notes=_notes)
