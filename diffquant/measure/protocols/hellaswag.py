"""HellaSwag's protocol: the model picks the likeliest of four endings, with lm-eval's text and scoring.

Source: Zellers et al., arXiv 1905.07830; lm-eval 0.4.13, tasks/hellaswag.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from diffquant import data
from diffquant.errors import UsageError
from diffquant.measure.language_model import LanguageModel, ModelOutputs, Request, RequestEncoder, join_states
from diffquant.measure.results import TaskResult
from diffquant.measure.scoring import make_kl_meter, score
from diffquant.measure.stats import mean_interval, standard_error
from diffquant.measure.task import BATCH_TOKENS
from diffquant.support.files import read_decompressed
from diffquant.support.names import first_few
from diffquant.support.plain_data import is_encodable_text, parse_json
from diffquant.support.progress import Progress, report_nothing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class HellaSwagItem:
    """A context with its candidate endings.

    Attributes:
        query: context that the endings continue.
        endings: candidates as they are scored, each after a space.
        label: index of the right ending.
    """

    query: str
    endings: tuple[str, ...]
    label: int

    @property
    def digest(self) -> str:
        """16 hex digits that change with anything a score depends on."""
        text = json.dumps([self.query, self.endings, self.label])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def evaluate_hellaswag(
    model: LanguageModel,
    items: Sequence[HellaSwagItem],
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress = report_nothing,
    reference: ModelOutputs | None = None,
) -> TaskResult:
    """Score every item zero-shot, without demonstrations.

    Args:
        reference: states of another model, from `compute_reference`.

    Returns:
        The choices by log-probability per character (acc_norm). In the details, an item's margin is the log-probability
        per character of its right ending minus that of the likeliest wrong one, in nats; its KL is the mean
        KL(reference ‖ model) over the tokens of its right ending, in nats.
    """
    requests = _requests(model.tokenizer, model.max_length, model.vocabulary_size, tuple(items))
    lengths = {index: len(requests[index].continuation) for index in _right_requests(items)}
    watch, mean_kl = (None, None) if reference is None else make_kl_meter(reference, lengths)
    scores = iter(score(model, requests, batch_tokens, progress, watch))
    logprobs = [[next(scores)[0] for _ in item.endings] for item in items]
    by_character = [
        [p / len(e) for p, e in zip(row, item.endings, strict=True)] for row, item in zip(logprobs, items, strict=True)
    ]
    n, labels = len(items), [item.label for item in items]
    choices, choices_norm = ([_index_of_largest(row) for row in rows] for rows in (logprobs, by_character))
    right, right_norm = ([int(x == y) for x, y in zip(each, labels, strict=True)] for each in (choices, choices_norm))
    margins = [_margin(row, label) for row, label in zip(by_character, labels, strict=True)]
    tokens, kl = list(lengths.values()), mean_kl() if mean_kl else []
    return TaskResult(
        metric="acc_norm",
        score=sum(right_norm) / n,
        n=n,
        values=[*right_norm],
        choices=choices_norm,
        details={
            "acc": sum(right) / n,
            "acc_se": standard_error(right),
            "acc_norm": sum(right_norm) / n,
            "acc_norm_se": standard_error(right_norm),
            "margin": sum(margins) / n,
            "choices_by_sum": choices,
            "labels": labels,
            "logprobs": [[round(p, 5) for p in row] for row in logprobs],
            "margins": margins,
            "tokens_by_item": tokens,
        }
        | ({"kl": mean_interval(kl, tokens).mean, "kl_by_item": kl} if kl else {}),
    )


def compute_reference(
    model: LanguageModel,
    items: Sequence[HellaSwagItem],
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress = report_nothing,
) -> ModelOutputs:
    """Compute a model's states at every token of the right endings, to compare other models with.

    People wrote only the right endings. The states of all endings would take four times the memory.
    """
    requests = _requests(model.tokenizer, model.max_length, model.vocabulary_size, tuple(items))
    seen: list[int] = []
    parts: list[ModelOutputs] = []

    def keep(owners: Sequence[int], states: ModelOutputs) -> None:
        seen.extend(owners)
        parts.append(states)

    score(model, [requests[index] for index in _right_requests(items)], batch_tokens, progress, keep)
    # One item after another, each in the order of its tokens.
    return join_states(parts)[torch.tensor(sorted(range(len(seen)), key=seen.__getitem__))]


def _right_requests(items: Sequence[HellaSwagItem]) -> list[int]:
    """Return the index of the request of each item's right ending."""
    firsts = accumulate((len(item.endings) for item in items), initial=0)
    return [first + item.label for first, item in zip(firsts, items, strict=False)]


# A sweep calls this for each of a model's cells, and encoding may take longer than scoring on a GPU.
@lru_cache(maxsize=1)
def _requests(
    tokenizer: "PreTrainedTokenizerBase", max_length: int, vocabulary: int, items: tuple[HellaSwagItem, ...]
) -> Sequence[Request]:
    """Encode the request of each ending of each item; the last result is cached."""
    encoder = RequestEncoder(tokenizer, max_length, vocabulary)
    return tuple(encoder.encode_requests((item.query, f" {ending}") for item in items for ending in item.endings))


def load_items(path: Path | None = None, limit: int | None = None) -> list[HellaSwagItem]:
    """Read the first `limit` items of a JSONL file (which may be compressed by gzip or xz), or of the bundled 1,000.

    A line is an original HellaSwag item (activity_label, ctx_a, ctx_b, endings, label) or a prepared one
    (query, endings, label).

    Raises:
        UsageError: the file cannot be read, is empty, or has lines that are not items (the message counts them).
    """
    lines = data.hellaswag_lines() if path is None else _read_lines(path)
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()][:limit]
    items, faults = [], []
    for number, line in numbered:
        try:
            items.append(parse_item(parse_json(line)))
        except (ValueError, UsageError) as error:
            faults.append(f"line {number}: {error}")
    if faults:
        raise UsageError(f"{len(faults)} lines of {path} are not items: {first_few(faults)}")
    if not items:
        raise UsageError(f"{path or 'the items'}: nothing to score; each line must be one HellaSwag item in JSON")
    return items


def parse_item(entry: object) -> HellaSwagItem:
    """Parse one item from its JSON object.

    Raises:
        UsageError: fields are missing or of the wrong kind.
    """
    if not isinstance(entry, dict):
        raise UsageError(f"expected a JSON object, got {type(entry).__name__}")
    texts = ["query"] if "query" in entry else ["activity_label", "ctx_a", "ctx_b"]
    missing = [name for name in texts if not is_encodable_text(entry.get(name))]
    if missing:
        raise UsageError(f"needs text in {', '.join(missing)}")
    endings = entry.get("endings")
    if not isinstance(endings, list) or len(endings) < 2 or not all(map(is_encodable_text, endings)):
        raise UsageError("endings must be a list of two or more texts")
    # Prepared items hold what lm-eval scores, which may begin with a blank.
    if "query" in entry:
        query, choices = str(entry["query"]), tuple(endings)
    else:
        query = remove_markup(f"{entry['activity_label']}: {entry['ctx_a']} {entry['ctx_b'].capitalize()}")
        choices = tuple(map(remove_markup, endings))
    if not all(choices):
        raise UsageError("endings must be a list of two or more texts")
    return HellaSwagItem(query, choices, _parse_label(entry.get("label"), len(endings)))


def remove_markup(text: str) -> str:
    """Remove markup of WikiHow texts, such as [title], as lm-eval does."""
    text = text.strip().replace(" [title]", ". ")
    return "\n".join(map(_without_brackets, text.split("\n"))).replace("  ", " ")


def _without_brackets(line: str) -> str:
    # Unclosed brackets stay. Searching for the end of each of them would take quadratic time.
    closed, bracket, rest = line.rpartition("]")
    return re.sub(r"\[[^\]]*\]", "", closed + bracket) + rest


def hellaswag_digest(items: Iterable[HellaSwagItem]) -> str:
    """Compute a digest that changes with any item and with their order."""
    return hashlib.sha256(" ".join(item.digest for item in items).encode()).hexdigest()[:16]


def _parse_label(label: object, endings: int) -> int:
    if type(label) is not int and not (isinstance(label, str) and re.fullmatch("[0-9]{1,9}", label)):
        raise UsageError(f"label must be a whole number, got {label!r:.40}")
    number = int(label)
    if not 0 <= number < endings:
        raise UsageError(f"label {number} is not one of {endings} endings")
    return number


def _margin(scores: Sequence[float], label: int) -> float:
    return scores[label] - max(value for index, value in enumerate(scores) if index != label)


def _index_of_largest(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _read_lines(path: Path) -> list[str]:
    try:
        # JSON may hold any of the other characters that str.splitlines cuts at, such as U+2028.
        return read_decompressed(path).decode("utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read items from {path}: {error}") from error
