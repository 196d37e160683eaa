"""Columns of loss by place: NLL of all tokens, of AR-hits and of the others, each with its paired change."""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from diffquant.evals.columns import FAILED, MISSING, Change, Compared, Drawn
from diffquant.evals.stats import mean_interval
from diffquant.evals.task_result import TaskResult
from diffquant.support.plain_data import JsonObject

# Words of a table, and what their fields in a result begin with.
_KINDS = {"NLL": "nll", "AR-hit": "ar_hit_nll", "other": "other_nll"}
_WEIGHTS = {"nll": "tokens_by_window", "ar_hit_nll": "ar_hits_by_window", "other_nll": "others_by_window"}


def _change(kind: str, compared: Compared) -> Drawn | None:
    """Mean change of the NLL of one kind of token, paired over windows, each as its tokens weigh."""
    if compared.result is None or compared.baseline is None:
        return None
    weights = compared.result.details[_WEIGHTS[kind]]
    if not sum(weights):
        return None
    now, before = (each.details[f"{kind}_by_window"] for each in (compared.result, compared.baseline))
    interval = mean_interval([a - b for a, b in zip(now, before, strict=True)], weights)
    return Drawn(interval.mean, interval.low, interval.high)


def _change_text(word: str, change: Drawn) -> str:
    return f"{word} {_signed_text(change)} nats"


def _signed_text(change: Drawn) -> str:
    return f"{change.value:+.4f} [{change.low:+.4f}, {change.high:+.4f}]"


class PositionColumns:
    """Columns of the task `nll`."""

    by_item: ClassVar[bool] = False
    changes: ClassVar[Sequence[Change]] = tuple(
        Change(f"{word}: change from\n16 bits, nats", False, partial(_change, kind), partial(_change_text, word))
        for word, kind in _KINDS.items()
    )
    score_label: ClassVar[str] = "NLL, nats"

    def heads(self, task: str, results: Sequence[TaskResult], alone: bool) -> list[str]:  # noqa: ARG002
        return [head for word in _KINDS for head in (word, "change [95 %]")]

    def texts(self, compared: Compared, results: Sequence[TaskResult]) -> list[str]:  # noqa: ARG002
        if compared.result is None:
            return [FAILED, *[MISSING] * (2 * len(_KINDS) - 1)]
        texts = []
        for kind in _KINDS.values():
            value, change = compared.result.details[kind], _change(kind, compared)
            texts += [MISSING if value is None else f"{value:.4f}", _signed_text(change) if change else MISSING]
        return texts

    def record(self, task: str, compared: Compared) -> JsonObject:
        details = compared.result.details if compared.result else {}
        record: JsonObject = {f"{task} ar_hit_share": details.get("ar_hit_share")}
        for kind in _KINDS.values():
            change = _change(kind, compared) or (None, None, None)
            ends = zip(("", "_low", "_high"), change, strict=True)
            record |= {f"{task} {kind}": details.get(kind)}
            record |= {f"{task} {kind}_change{end}": value for end, value in ends}
        return record

    def unmeasured(self) -> JsonObject:
        return {}

    def score(self, compared: Compared) -> Drawn | None:
        """The NLL of all tokens, with its interval over windows."""
        if compared.result is None:
            return None
        details = compared.result.details
        interval = mean_interval(details["nll_by_window"], details["tokens_by_window"])
        return Drawn(interval.mean, interval.low, interval.high)

    def notes(self, results: Sequence[TaskResult]) -> list[str]:
        if not results:
            return []
        first = results[0].details
        share = f"{100 * first['ar_hit_share']:.1f} %"
        return [
            f"NLL is in nats per token of text, in windows of {first['positions'][-1]} tokens. AR-hits end a bigram "
            f"that stood in their window before; they are {share} of the first model's tokens. "
            "Changes from 16 bits are paired over windows."
        ]
