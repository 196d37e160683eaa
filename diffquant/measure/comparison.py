"""Compares two results on the same items, item by item, and reads lm-eval's results. Does not import torch."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diffquant.errors import UsageError
from diffquant.measure.results import TaskResult
from diffquant.measure.stats import Difference, mcnemar_p_value, mean_interval, paired_difference
from diffquant.support.files import read_text
from diffquant.support.names import first_few
from diffquant.support.plain_data import JsonObject, parse_json, plain_data_digest

# Fields of a task's identity that do not determine its items; and lm-eval's filter that names of measures leave out.
_NOT_ITEM_SETTINGS, _DEFAULT_FILTER = ("name", "batch_tokens"), "none"
PERCENT, MARGIN, _NLL, _PLAIN = "%", "nats per 100 characters", "nats per token", ""
# The factor for the numbers of each unit, and the format of a value.
UNITS = {PERCENT: (100, ".1f"), MARGIN: (100, ".2f"), _NLL: (1, ".4f"), _PLAIN: (1, ".4g")}


@dataclass(frozen=True)
class Scores:
    """One number per item, and each item's weight in the mean; weights are equal by default.

    Attributes:
        unit: unit of the values, a key of `UNITS`; empty for a plain number.
    """

    values: Sequence[float]
    unit: str
    weights: Sequence[float] | None = None

    @classmethod
    def from_metric(cls, values: Sequence[float]) -> "Scores":
        """Return the scores of a task's metric, as percentages if all lie between 0 and 1."""
        return cls(values, PERCENT if all(0 <= value <= 1 for value in values) else _PLAIN)

    @property
    def is_binary(self) -> bool:
        return set(self.values) <= {0, 1}

    @property
    def nonfinite_items(self) -> list[int]:
        """Indices of the items whose value is NaN or infinite."""
        return [place for place, value in enumerate(self.values) if not math.isfinite(value)]


@dataclass(frozen=True)
class Outcome:
    """Scores of one configuration on one task.

    Attributes:
        name: name of the configuration; empty if the run has only one configuration.
        item_settings: settings that determine the items; only outcomes with equal settings can be compared.
        ids: ids of the items, or of a text's windows, in an order that depends only on the items.
        scores: scores by name of the measure (margin, NLL or a metric), the most sensitive first.
        prompts: digest of the prompts, or None if the items determine them.
    """

    name: str
    task: str
    item_settings: JsonObject
    ids: Sequence[int | str]
    scores: Mapping[str, Scores]
    prompts: str | None = None


@dataclass(frozen=True)
class Comparison:
    """The comparison of two outcomes by one measure.

    Attributes:
        outcomes: the two outcomes, before and after.
        measure: name of the measure.
        unit: unit of its values, a key of `UNITS`.
        n: number of items.
        before, after: mean over the items of each outcome.
        difference: mean of the paired differences after - before, with its 95 % interval.
        gained, lost: ids of the items that became right and of those that became wrong, or None if values are not 0
            or 1.
    """

    outcomes: tuple[Outcome, Outcome]
    measure: str
    unit: str
    n: int
    before: float
    after: float
    difference: Difference
    gained: list[int | str] | None
    lost: list[int | str] | None

    @property
    def p_value(self) -> float | None:
        """P-value of McNemar's exact test that gains and losses are equally likely, or None if `gained` is None."""
        return None if self.gained is None or self.lost is None else mcnemar_p_value(len(self.gained), len(self.lost))

    @property
    def name(self) -> str:
        """The configuration's name, or both names if they differ."""
        return " -> ".join(dict.fromkeys(outcome.name for outcome in self.outcomes))

    @property
    def task(self) -> str:
        return self.outcomes[0].task


def make_outcome(name: str, task: str, identity: JsonObject, result: TaskResult) -> Outcome:
    """Make an outcome from the result of a sweep's cell.

    Args:
        name: name of the configuration.
        identity: result of `Task.identity`, which determines the items.
    """
    details = result.details
    item_settings = {field: value for field, value in identity.items() if field not in _NOT_ITEM_SETTINGS}
    # Needles and windows depend on the tokenizer, which the identity does not name.
    item_settings |= {"needles": details["items"]} if "items" in details else {}
    scores: dict[str, Scores] = {}
    if "margins" in details:
        scores["margin"] = Scores(details["margins"], MARGIN)
    if result.values:
        scores[result.metric] = Scores.from_metric(result.values)
    if details.get("nll_by_window"):
        item_settings["tokens"] = sum(details["tokens_by_window"])
        scores["NLL"] = Scores(details["nll_by_window"], _NLL, details["tokens_by_window"])
    count = max((len(each.values) for each in scores.values()), default=0)
    return Outcome(name, task, item_settings, range(1, count + 1), scores)


def compare_outcomes(before: Outcome, after: Outcome) -> list[Comparison]:
    """Compare two outcomes by every measure that both have.

    Raises:
        UsageError: their tasks, items or texts differ, or they share no measure that is finite for every item.
    """
    if before.task != after.task:
        raise UsageError(f"A is a result of {before.task} and B of {after.task}; give two results of the same task")
    differing = [
        f"{name}: {before.item_settings.get(name, 'absent')} and {after.item_settings.get(name, 'absent')}"
        for name in dict.fromkeys([*before.item_settings, *after.item_settings])
        if before.item_settings.get(name) != after.item_settings.get(name)
    ]
    if differing:
        raise UsageError(
            f"{before.task}: A and B have different items ({first_few(differing)}); measure both with the same "
            "options, on the same items or text"
        )
    if list(before.ids) != list(after.ids):
        raise UsageError(
            f"{before.task}: A has scores of {len(before.ids)} items and B of {len(after.ids)}, which cannot be "
            "compared item by item; measure both again"
        )
    shared = [name for name in before.scores if name in after.scores]
    sound = [name for name in shared if not (before.scores[name].nonfinite_items or after.scores[name].nonfinite_items)]
    if not shared:
        found = "; ".join(", ".join(outcome.scores) or "none" for outcome in (before, after))
        raise UsageError(f"{before.task}: A and B have no measure in common ({found}); measure both again")
    if not sound:
        raise UsageError(f"nothing to compare: {first_few(list_left_out_measures(before, after))}")
    return [_compare_measure(name, before, after) for name in sound]


def list_left_out_measures(before: Outcome, after: Outcome) -> list[str]:
    """Return a line for each measure that `compare_outcomes` leaves out, with the reason.

    Reasons are that one outcome lacks the measure, or that one of its values is NaN or infinite.
    """
    reasons = []
    for name in dict.fromkeys([*before.scores, *after.scores]):
        for letter, outcome in (("A", before), ("B", after)):
            if name not in outcome.scores:
                reasons.append(f"{letter} has no {before.task} {name}")
            elif faulty := outcome.scores[name].nonfinite_items:
                items = first_few((outcome.ids[place] for place in faulty), ", ")
                reasons.append(f"{letter}'s {before.task} {name} is not finite for item {items}")
    return reasons


def _compare_measure(measure: str, before: Outcome, after: Outcome) -> Comparison:
    old, new = before.scores[measure], after.scores[measure]
    gained: list[int | str] | None = None
    lost: list[int | str] | None = None
    if old.weights is not None:
        difference = mean_interval([b - a for a, b in zip(old.values, new.values, strict=True)], old.weights)
    else:
        difference = paired_difference(new.values, old.values)
        if old.is_binary and new.is_binary:
            changed = [(i, b > a) for i, a, b in zip(before.ids, old.values, new.values, strict=True) if a != b]
            gained, lost = [i for i, is_gain in changed if is_gain], [i for i, is_gain in changed if not is_gain]
    means = [mean_interval(scores.values, scores.weights).mean for scores in (old, new)]
    return Comparison((before, after), measure, old.unit, len(old.values), means[0], means[1], difference, gained, lost)


def read_samples(path: Path) -> Outcome:
    """Read a samples_*.jsonl of lm-eval: every metric of every document, NaN if it is not a number.

    If choices were scored by log-probability, the margin of the right choice over the most likely wrong one is also
    included. Documents are sorted by id, since the order of the lines depends on how many processes lm-eval used.

    Raises:
        UsageError: the file cannot be read, or has lines that are not samples (the message counts them all).
    """
    try:
        lines = [(number, line) for number, line in enumerate(read_text(path).split("\n"), 1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    by_filter: dict[str, dict[int | str, JsonObject]] = {}
    faults = []
    for number, line in lines:
        try:
            sample = _sample(line)
            documents = by_filter.setdefault(str(sample["filter"]), {})
            if sample["doc_id"] in documents:
                raise ValueError(f"document {sample['doc_id']} appears twice")
            documents[sample["doc_id"]] = sample
        except ValueError as error:
            faults.append(f"line {number}: {error}")
    if faults:
        raise UsageError(f"{len(faults)} lines of {path} are not samples of lm-eval: {first_few(faults)}")
    if not by_filter:
        raise UsageError(f"{path} is empty: it needs the lines that lm_eval --log_samples writes")
    # Numbers come first.
    first = dict(sorted(next(iter(by_filter.values())).items(), key=lambda item: (isinstance(item[0], str), item[0])))
    uneven = [name for name, documents in by_filter.items() if documents.keys() != first.keys()]
    if uneven:
        raise UsageError(f"{path}: filter {', '.join(uneven)} has other documents than the first; run lm_eval again")
    scores: dict[str, Scores] = {}
    for name, documents in by_filter.items():
        ending = "" if name == _DEFAULT_FILTER else f",{name}"
        found = _scores([documents[each] for each in first])
        scores |= {f"{metric}{ending}": each for metric, each in found.items()}
    named = re.fullmatch(r"samples_(.+)_\d{4}-\d\d-\d\dT[\d.:-]+", path.stem)
    return Outcome(
        "",
        named[1] if named else path.stem,
        {f"document {each}": sample["doc_hash"] + sample["target_hash"] for each, sample in first.items()},
        list(first),
        scores,
        plain_data_digest([sample["prompt_hash"] for sample in first.values()]),
    )


def _sample(line: str) -> JsonObject:
    """Parse one line.

    Raises:
        ValueError: it is not JSON, or lacks a field.
    """
    sample = parse_json(line)
    if not isinstance(sample, dict):
        raise ValueError(f"expected a JSON object, got {type(sample).__name__}")
    # Earlier versions wrote one filter and no list of metrics.
    sample = {"filter": _DEFAULT_FILTER, "prompt_hash": ""} | sample
    missing = [name for name in ("doc_id", "doc_hash", "target_hash", "metrics") if name not in sample]
    if missing:
        raise ValueError(f"has no {', '.join(missing)}")
    if not isinstance(sample["doc_id"], int | str):
        raise ValueError("doc_id must be a number or a text")
    if not isinstance(sample["metrics"], list) or not all(isinstance(name, str) for name in sample["metrics"]):
        raise ValueError("metrics must be a list of names")
    if not all(isinstance(sample[name], str) for name in ("doc_hash", "target_hash")):
        raise ValueError("doc_hash and target_hash must be texts")
    return sample


def _scores(samples: list[JsonObject]) -> dict[str, Scores]:
    scores: dict[str, Scores] = {}
    margins = [_margin(sample) for sample in samples]
    known = [margin for margin in margins if margin is not None]
    if len(known) == len(samples):
        scores["margin"] = Scores(known, MARGIN)
    for metric in dict.fromkeys(name for sample in samples for name in sample["metrics"]):
        values = [sample.get(metric) for sample in samples]
        scores[metric] = Scores.from_metric([float(x) if isinstance(x, int | float) else math.nan for x in values])
    return scores


def _margin(sample: JsonObject) -> float | None:
    """Return the margin of the right choice over the likeliest wrong one, in nats per character, or None if unknown."""
    # Tasks scored by mutual information contain every choice twice.
    if not {"acc", "acc_norm"} & set(sample["metrics"]) or "acc_mutual_info" in sample["metrics"]:
        return None
    try:
        choices = [arguments["arg_1"].removeprefix(" ") for arguments in sample["arguments"].values()]
        logprobs = [float(logprob) for logprob, _ in sample["filtered_resps"]]
        right = int(sample["target"])
        by_character = [p / len(choice) for p, choice in zip(logprobs, choices, strict=True)]
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        # The target is text, or the answers are not log-probabilities.
        return None
    wrong = [value for index, value in enumerate(by_character) if index != right]
    if not (0 <= right < len(by_character) and wrong):
        return None
    # Whether max() skips a NaN or returns it depends on the order.
    return math.nan if any(map(math.isnan, by_character)) else by_character[right] - max(wrong)
