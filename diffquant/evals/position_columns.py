"""Columns of loss by position: NLL of all tokens, of AR-hits and of the others, each with its paired change."""

from collections.abc import Sequence
from functools import partial

from diffquant.evals.columns import FAILED, MISSING, Column, Columns, Compared, Metric, bounded, ends
from diffquant.evals.stats import Difference, mean_interval
from diffquant.evals.task_result import TaskResult
from diffquant.support.plain_data import JsonObject

# Words in the table, and the prefixes of their fields in a result.
_KINDS = {"NLL": "nll", "AR-hit": "ar_hit_nll", "other": "other_nll"}
_WEIGHTS = {"nll": "tokens_by_window", "ar_hit_nll": "ar_hits_by_window", "other_nll": "others_by_window"}


def _change(kind: str, compared: Compared) -> Difference | None:
    """Mean change of the NLL of one kind of token, paired over windows and weighted by their tokens."""
    if compared.result is None or compared.baseline is None:
        return None
    weights = compared.result.details[_WEIGHTS[kind]]
    if not sum(weights):
        return None
    now, before = (each.details[f"{kind}_by_window"] for each in (compared.result, compared.baseline))
    return mean_interval([a - b for a, b in zip(now, before, strict=True)], weights)


def _value_text(kind: str, compared: Compared) -> str:
    if compared.result is None:
        return FAILED if kind == "nll" else MISSING
    value = compared.result.details[kind]
    return MISSING if value is None else f"{value:.4f}"


def _change_text(kind: str, compared: Compared) -> str:
    return bounded(_change(kind, compared), "+.4f")


def _words(word: str, change: Difference) -> str:
    return f"{word} {bounded(change, '+.4f')} nats"


def _nll(compared: Compared) -> Difference | None:
    """The NLL of all tokens, with its interval over windows."""
    if compared.result is None:
        return None
    details = compared.result.details
    return mean_interval(details["nll_by_window"], details["tokens_by_window"])


def _record(compared: Compared) -> JsonObject:
    details = compared.result.details if compared.result else {}
    record: JsonObject = {"ar_hit_share": details.get("ar_hit_share")}
    for kind in _KINDS.values():
        change = _change(kind, compared)
        record |= {kind: details.get(kind), f"{kind}_change": change.mean if change else None}
        record |= ends((f"{kind}_change_low", f"{kind}_change_high"), change)
    return record


def _notes(results: Sequence[TaskResult]) -> list[str]:
    if not results:
        return []
    first = results[0].details
    share = f"{100 * first['ar_hit_share']:.1f} %"
    return [
        f"NLL is in nats per token of text, in windows of {first['positions'][-1]} tokens. AR-hits end a bigram "
        f"that stood in their window before; they are {share} of the first model's tokens. "
        "Changes from 16 bits are paired over windows."
    ]


POSITIONS = Columns(
    table=tuple(
        column
        for word, kind in _KINDS.items()
        for column in (
            Column(word, partial(_value_text, kind)),
            Column("change [95 %]", partial(_change_text, kind)),
        )
    ),
    changes=tuple(
        Metric(f"{word}: change from\n16 bits, nats", partial(_change, kind), partial(_words, word))
        for word, kind in _KINDS.items()
    ),
    score=Metric("NLL, nats", _nll),
    record=_record,
    notes=_notes,
    by_item=False,
)
