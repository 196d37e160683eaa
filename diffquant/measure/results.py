"""The result of a task, and the columns with which tables and plots show it. No torch here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from diffquant.measure.stats import (
    Difference,
    count_flips,
    mean_interval,
    paired_difference,
    recovery,
    standard_error,
    wilson_interval,
)
from diffquant.support.plain_data import JsonObject

_TASKS = ("metric", "score", "n", "values", "choices")
_TYPES: dict[str, tuple[type, ...]] = {"score": (int, float), "n": (int,), "commit": (str,)}
_TYPES |= dict.fromkeys(("values", "choices", "logit_report"), (list,))
_CELLS = ("seconds", "logit_report", "stored", "commit")


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """The result of a task on a model.

    Attributes:
        metric: name of the task's main number.
        score: mean over the items, or None if the task does not score items.
        n: number of items, or None if the task does not score items.
        values: score of each item, or None if unknown.
        choices: answer to each item, or None if an item has several.
        details: all other results as plain data, under names that the task chooses.
        seconds: time that the task took. This and all following fields are None unless a sweep measured the result.
        weight_bytes: bytes of the checkpoint that stores the recipe's weights.
        kv_bytes: bytes per token of the recipe's KV cache, over all layers.
        logit_report: numbers about each layer's logit quantizer, or None if logits are not quantized.
        commit: commit of the code that measured it, with "+changes" if the sources differed; None when unknown.
    """

    metric: str
    score: float | None = None
    n: int | None = None
    values: list[float] | None = None
    choices: list[int] | None = None
    details: JsonObject = field(default_factory=dict)
    # Fields on how the result was measured; they do not count in comparisons.
    seconds: float | None = field(default=None, compare=False)
    weight_bytes: int | None = field(default=None, compare=False)
    kv_bytes: float | None = field(default=None, compare=False)
    logit_report: list[dict[str, float]] | None = field(default=None, compare=False)
    commit: str | None = field(default=None, compare=False)

    def to_dict(self) -> JsonObject:
        """Return the task's measurements as one flat object, which `from_dict` reads."""
        scored = {} if self.score is None else {"score": self.score, "n": self.n, "values": self.values}
        chosen = {} if self.choices is None else {"choices": self.choices}
        return {"metric": self.metric} | scored | chosen | self.details

    def to_cell(self) -> JsonObject:
        """Return the measurements, time, sizes and commit as one flat object, which `from_dict` reads."""
        report = {} if self.logit_report is None else {"logit_report": self.logit_report}
        stored = {"weights": self.weight_bytes, "kv_per_token": self.kv_bytes}
        made = {} if self.commit is None else {"commit": self.commit}
        return self.to_dict() | {"seconds": self.seconds} | report | {"stored": stored} | made

    @classmethod
    def from_dict(cls, content: Mapping[str, object]) -> Self:
        """Read a result that `to_dict` or `to_cell` wrote.

        Raises:
            ValueError: `content` does not have that form.
        """
        found: JsonObject = {name: content.get(name) for name in (*_TASKS, *_CELLS)}
        stored = found.pop("stored")
        wrong = [name for name, types in _TYPES.items() if not isinstance(found[name], (*types, type(None)))]
        if wrong or not isinstance(found["metric"], str):
            raise ValueError(
                "a result needs the name of its metric, a number as score, and lists of values and choices"
            )
        sizes = [stored.get(name) for name in ("weights", "kv_per_token")] if isinstance(stored, dict) else []
        is_measured = all(isinstance(number, int | float) for number in (found["seconds"], *sizes))
        if {*_CELLS} & content.keys() and not (sizes and is_measured):
            raise ValueError("a sweep's result needs its time and stored sizes")
        weight_bytes, kv_bytes = sizes or (None, None)
        details = {name: value for name, value in content.items() if name not in (*_TASKS, *_CELLS)}
        return cls(**found, weight_bytes=weight_bytes, kv_bytes=kv_bytes, details=details)


MISSING, FAILED = "-", "failed"


@dataclass(frozen=True)
class Metric:
    """A number that tables and plots show: a score, or a change from 16 bits.

    `text` and `estimate` take two results: that of a configuration, or None if its cell failed, and the 16-bit result
    to compare with, or None if there is no comparison.

    Attributes:
        head: heading of its column, with placeholders {task} and {metric} (name of the score); empty if it has no
            column.
        text: function from the two results to the text of a table's cell.
        label: label of its axis in plots; empty if it is not drawn.
        estimate: function from the two results to the number with its 95 % interval, or to None. An unknown interval
            has width zero.
        words: function from a change to words, such as "-5.8 points [-10.4, -1.1]", or None if the metric is a score.
        is_log: whether its axis is logarithmic; such a number is never negative.
        required_detail: the column is shown only if `details` of some result has this key; empty to show it always.
    """

    head: str = ""
    text: Callable[[TaskResult | None, TaskResult | None], str] = lambda *_: MISSING
    label: str = ""
    estimate: Callable[[TaskResult | None, TaskResult | None], Difference | None] = lambda *_: None
    words: Callable[[Difference], str] | None = None
    is_log: bool = False
    required_detail: str = ""


@dataclass(frozen=True)
class Columns:
    """How tables and plots show a task's results.

    Attributes:
        metrics: numbers in the table's order; of the changes from 16 bits, the most sensitive comes first.
        record: function from a result and the 16-bit result to a row's unrounded numbers.
        notes: function from the results of all tasks with these columns to the notes below the table.
        by_item: whether the task scores items. Tables show such tasks first.
        named_alone: whether headings contain the task's name even if no other task in the table scores items.
        has_own_names: whether a row has `record`'s numbers under names that begin with the task's name. If not, the
            names are unchanged, and rows have them in every sweep, even one that did not measure the task.
    """

    metrics: tuple[Metric, ...]
    record: Callable[[TaskResult | None, TaskResult | None], JsonObject]
    notes: Callable[[Sequence[TaskResult]], list[str]]
    by_item: bool = True
    named_alone: bool = True
    has_own_names: bool = True

    @property
    def change_metrics(self) -> list[Metric]:
        """Measures of the change from 16 bits, the most sensitive first."""
        return [metric for metric in self.metrics if metric.words]

    @property
    def plotted_metrics(self) -> list[Metric]:
        """Metrics that plots show: changes from 16 bits, then the score."""
        return [*self.change_metrics, *(metric for metric in self.metrics if metric.label and not metric.words)]

    def table_metrics(self, results: Sequence[TaskResult]) -> list[Metric]:
        """Return the metrics that are columns of the text table, without those whose detail no result has."""
        details = {"", *(name for result in results for name in result.details)}
        return [metric for metric in self.metrics if metric.head and metric.required_detail in details]

    def headings(self, task: str, results: Sequence[TaskResult], alone: bool) -> list[str]:
        """Return headings of the text table's columns.

        Args:
            alone: whether no other task in the table scores items.
        """
        name = f"{task} " if self.named_alone or not alone else ""
        metric = results[0].metric if results else "score"
        return [column.head.format(task=name, metric=metric) for column in self.table_metrics(results)]


def _difference(result: TaskResult | None, baseline: TaskResult | None) -> Difference | None:
    """Return the paired difference of the score, as a fraction."""
    if result is None or baseline is None or result.values is None or baseline.values is None:
        return None
    return paired_difference(result.values, baseline.values)


def _points(result: TaskResult | None, baseline: TaskResult | None) -> Difference | None:
    change = _difference(result, baseline)
    return change.times(100) if change else None


def _percentage(result: TaskResult | None, _: object = None) -> Difference | None:
    return (_interval(result) or Difference(*3 * [_mean(result)])).times(100) if result else None


def _score_text(result: TaskResult | None, _: object) -> str:
    if result is None:
        return FAILED
    # Some results have no scores per item, such as a perplexity over documents.
    return format_interval(_percentage(result), ".1f") if result.values else f"{_mean(result):.4g}"


def format_interval(number: Difference | None, spec: str, unit: str = "") -> str:
    """Format a number with its interval, such as "-5.8 points [-10.4, -1.1]"; "-" if it is None.

    Args:
        spec: format specification of all three numbers, such as "+.1f".
        unit: text after the number, such as " points".
    """
    return MISSING if number is None else f"{number.mean:{spec}}{unit} [{number.low:{spec}}, {number.high:{spec}}]"


def format_kl(number: Difference | None) -> str:
    """Format a mean KL with its interval, without the interval if its width is zero; "-" if the KL is None."""
    return f"{number.mean:.2g}" if number and number.low == number.high else format_interval(number, ".2g")


def _flips_text(result: TaskResult | None, baseline: TaskResult | None) -> str:
    numbers = _flips(result, baseline)
    return f"+{numbers['gained']} -{numbers['lost']}" if numbers["gained"] is not None else MISSING


def _flips(result: TaskResult | None, baseline: TaskResult | None) -> JsonObject:
    names = ("gained", "lost", "choices_changed")
    if result is None or baseline is None or result.values is None or baseline.values is None:
        return dict.fromkeys(names)
    if not {*result.values, *baseline.values} <= {0, 1}:
        return dict.fromkeys(names)  # a mean over draws is neither right nor wrong
    counts = count_flips(result.values, baseline.values, result.choices, baseline.choices)
    return dict(zip(names, counts, strict=True))


def _item_record(result: TaskResult | None, baseline: TaskResult | None) -> JsonObject:
    """Return numbers of a task that is scored by item: score, difference from 16 bits, flips, recovery."""
    bounds, change = _interval(result) if result else None, _difference(result, baseline)
    return {
        "metric": result.metric if result else None,
        "score": _mean(result) if result else None,
        "se": standard_error(result.values) if result and result.values else None,
        "low": bounds.low if bounds else None,
        "high": bounds.high if bounds else None,
        "n": _count(result) if result else None,
        **interval_fields("difference", change),
        **_flips(result, baseline),
        **interval_fields("recovery", recovery(change, _mean(baseline)) if change and baseline else None),
    }


def _item_notes(results: Sequence[TaskResult]) -> list[str]:
    """Explain scores of items."""
    counts = sorted({_count(result) for result in results})
    if not counts:
        return []
    # Tasks of your own, such as those of examples/shots, may show demonstrations.
    shots = sorted({result.details["shots"] for result in results if "shots" in result.details})
    shown = f"many-shot after {', '.join(map(str, shots))} demonstrations" if shots else "zero-shot"
    return [
        f"{', '.join(map(str, counts))} items, {shown}. Brackets hold 95 % intervals: Wilson's for shares, "
        "Student's for other scores. The difference from 16 bits, in points, is paired over the same items; flips "
        "are the items that became right (+) and wrong (-)."
    ]


POINTS = Metric(
    "difference [95 %]",
    lambda *results: format_interval(_points(*results), "+.1f"),
    "difference from 16 bits, points",
    _points,
    lambda change: format_interval(change, "+.1f", " points"),
)
_SCORE = Metric("{task}{metric} % [95 %]", _score_text, "score, %", _percentage)

ITEMS = Columns((_SCORE, POINTS, Metric("flips", _flips_text)), record=_item_record, notes=_item_notes)


def _mean(result: TaskResult) -> float:
    return sum(result.values) / len(result.values) if result.values else result.score or 0.0


def _count(result: TaskResult) -> int:
    return len(result.values) if result.values else result.n or 0


def _interval(result: TaskResult) -> Difference | None:
    """Return the mean score with its 95 % interval, Wilson's if all are 0 or 1, or None if items have no scores."""
    values = result.values
    if not values:
        return None
    n = len(values)
    if set(values) <= {0.0, 1.0}:
        share = sum(values) / n
        low, high = wilson_interval(round(sum(values)), n)
        # At 0 and 1 one end equals the score; do not let rounding push it past.
        return Difference(share, min(low, share), max(high, share))
    interval = mean_interval(values)
    if not all(0 <= value <= 1 for value in values):
        return interval
    # A score cannot leave [0, 1].
    return Difference(interval.mean, max(interval.low, 0.0), min(interval.high, 1.0))


def interval_fields(name: str, number: Difference | None, per: float = 1) -> JsonObject:
    """Return a number and the ends of its interval under three names, such as kl, kl_low and kl_high for "kl".

    Args:
        number: the number, or None to make all three None.
        per: number by which all three are divided.
    """
    ends = (number.mean, number.low, number.high) if number else ()
    names = (name, f"{name}_low", f"{name}_high")
    return dict.fromkeys(names) | {end: value / per for end, value in zip(names, ends, strict=False)}
