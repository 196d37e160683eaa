"""Reads the `samples_*.jsonl` that `lm_eval --log_samples` writes: one object per line and document.

Source: lm-eval 0.4.13, `evaluator.evaluate` and `EvaluationTracker.save_results_samples`.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path

from diffquant.errors import UsageError
from diffquant.evals.comparison import MARGIN, PERCENT, PLAIN, Outcome, Scores
from diffquant.support.files import read_text
from diffquant.support.listing import first_few
from diffquant.support.plain_data import JsonObject, parse_json, plain_digest

_NAME = re.compile(r"samples_(.+)_\d{4}-\d\d-\d\dT[\d.:-]+")
_DEFAULT_FILTER = "none"


def read_samples(path: Path) -> Outcome:
    """Read a model's scores on one task of lm-eval: every metric, NaN for documents where it is not a number.

    If a document's choices were scored by log-probability, the margin of the right one is included. Documents are
    sorted by id, since the order of the lines depends on how many processes lm-eval used.

    Raises:
        UsageError: the file cannot be read, or has lines that are not samples (the message counts them all).
    """
    by_filter: dict[str, dict[int | str, JsonObject]] = {}
    faults = []
    for number, line in _lines(path):
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
    first = dict(sorted(next(iter(by_filter.values())).items(), key=lambda item: _place(item[0])))
    uneven = [name for name, documents in by_filter.items() if documents.keys() != first.keys()]
    if uneven:
        raise UsageError(f"{path}: filter {', '.join(uneven)} has other documents than the first")
    scores: dict[str, Scores] = {}
    for name, documents in by_filter.items():
        ending = "" if name == _DEFAULT_FILTER else f",{name}"
        found = _scores([documents[each] for each in first])
        scores |= {f"{metric}{ending}": each for metric, each in found.items()}
    named = _NAME.fullmatch(path.stem)
    return Outcome(
        "",
        named[1] if named else path.stem,
        {f"document {each}": sample["doc_hash"] + sample["target_hash"] for each, sample in first.items()},
        list(first),
        scores,
        plain_digest([sample["prompt_hash"] for sample in first.values()]),
    )


def _place(doc_id: int | str) -> tuple[bool, int | str]:
    """Sort key of documents: numbers first."""
    return isinstance(doc_id, str), doc_id


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        lines = read_text(path).split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _sample(line: str) -> JsonObject:
    """Parse one line.

    Raises:
        ValueError: it is no JSON, or lacks a field.
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
    told = [margin for margin in margins if margin is not None]
    if len(told) == len(samples):
        scores["margin"] = Scores(told, MARGIN)
    for metric in dict.fromkeys(name for sample in samples for name in sample["metrics"]):
        values = [sample.get(metric) for sample in samples]
        numbers = [float(value) if isinstance(value, int | float) else math.nan for value in values]
        shares = all(0 <= value <= 1 for value in numbers)
        scores[metric] = Scores(numbers, PERCENT if shares else PLAIN)
    return scores


def _margin(sample: JsonObject) -> float | None:
    """Margin of the right choice over the likeliest wrong one, in nats per character; None if unknown."""
    # Tasks scored by mutual information ask for every choice twice.
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
