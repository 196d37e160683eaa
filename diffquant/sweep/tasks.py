"""What is measured in a cell: each task says what determines its result, and gives it as plain data."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, cast

from diffquant.errors import UsageError
from diffquant.evals import harness, hellaswag, labelled, manyshot, needle, perplexity
from diffquant.evals.hellaswag import Item
from diffquant.evals.language_model import LanguageModel, States
from diffquant.evals.stats import estimate
from diffquant.support.progress import Progress
from diffquant.sweep.grid import SweepOptions
from diffquant.text import corpus

HARNESS_PREFIX = "lm-eval:"
NEEDLE = "needle"
MANY_SHOT = "many-shot"
_MANY_SHOT_NAME = re.compile(rf"{MANY_SHOT}:(all|\d+)(?::(\d+))?")


class Task(Protocol):
    @property
    def name(self) -> str: ...

    def identity(self) -> dict[str, Any]:
        """All that the result depends on beside model and recipe, as plain data."""

    def in_batches_of(self, tokens: int) -> "Task":
        """The same task in passes of at most this many tokens."""

    def run(self, model: LanguageModel, tokenizer: Any, reference: States | None, progress: Progress) -> dict[str, Any]:
        """The result as plain data; `reference` is the 16-bit model's reading of the text, where KL is wanted."""


class _Batched:
    batch_tokens: int

    def in_batches_of(self, tokens: int) -> Self:
        return replace(cast(Any, self), batch_tokens=min(self.batch_tokens, tokens))


@dataclass(frozen=True)
class HellaSwag(_Batched):
    items: Sequence[Item]
    batch_tokens: int
    name: str = "hellaswag"

    def identity(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "shots": 0,
            "n": len(self.items),
            "items": hellaswag.identity(self.items),
            "batch_tokens": self.batch_tokens,
        }

    def run(self, model: LanguageModel, tokenizer: Any, reference: States | None, progress: Progress) -> dict[str, Any]:
        outcome = hellaswag.evaluate(model, tokenizer, self.items, self.batch_tokens, progress)
        acc, acc_norm = estimate(outcome.correct), estimate(outcome.correct_norm)
        return {
            "metric": "acc_norm",
            "score": acc_norm.mean,
            "n": acc.n,
            "acc": acc.mean,
            "acc_se": acc.se,
            "acc_norm": acc_norm.mean,
            "acc_norm_se": acc_norm.se,
            "values": [int(right) for right in outcome.correct_norm],
            "choices": outcome.choices_norm,
            "choices_by_sum": outcome.choices,
            "labels": outcome.labels,
            "logprobs": [[round(p, 5) for p in row] for row in outcome.logprobs],
        }


@dataclass(frozen=True)
class Perplexity(_Batched):
    text: str
    window: int
    stride: int
    batch_tokens: int
    name: str = "perplexity"

    def identity(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "text": corpus.identity(self.text),
            "characters": len(self.text),
            "window": self.window,
            "stride": self.stride,
            "batch_tokens": self.batch_tokens,
        }

    def run(self, model: LanguageModel, tokenizer: Any, reference: States | None, progress: Progress) -> dict[str, Any]:
        score = perplexity.evaluate(
            model, tokenizer, self.text, self.window, self.stride, self.batch_tokens, reference, progress
        )
        return {
            "metric": "perplexity",
            "perplexity": score.perplexity,
            "bits_per_byte": score.bits_per_byte,
            "kl": score.kl,
            "tokens": score.tokens,
            "text_bytes": score.text_bytes,
        }

    def reference_of(self, model: LanguageModel, tokenizer: Any, progress: Progress) -> States:
        """What `run` compares quantized models with."""
        return perplexity.reference_of(
            model, tokenizer, self.text, self.window, self.stride, self.batch_tokens, progress
        )


@dataclass(frozen=True)
class Needle(_Batched):
    """Retrieval of `asked` among `needles` numbers; the items depend on the tokenizer."""

    text: str
    plan: needle.Plan
    limit: int | None
    batch_tokens: int

    @property
    def name(self) -> str:
        return f"{NEEDLE}:{self.plan.needles}:{self.plan.asked}"

    def identity(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "items": needle.ITEMS_FORMAT,
            "text": corpus.identity(self.text),
            "lengths": list(self.plan.lengths),
            "samples": self.plan.samples,
            "seed": self.plan.seed,
            "limit": self.limit,
            "batch_tokens": self.batch_tokens,
        }

    def run(self, model: LanguageModel, tokenizer: Any, reference: States | None, progress: Progress) -> dict[str, Any]:
        outcome = needle.evaluate(model, tokenizer, self.text, self.plan, self.limit, self.batch_tokens, progress)
        score = estimate(outcome.retrieved)
        return {
            "metric": "retrieved",
            "score": score.mean,
            "n": score.n,
            "retrieved": score.mean,
            "retrieved_se": score.se,
            "values": outcome.retrieved,
            "items": needle.identity(outcome.items),
            "by_place": outcome.by_place(),
        }


@dataclass(frozen=True)
class ManyShot(_Batched):
    """In-context classification after `plan.shots` demonstrations; where that is all that fit, they depend on
    the tokenizer."""

    data: labelled.Dataset
    plan: manyshot.Plan
    limit: int | None
    batch_tokens: int

    @property
    def name(self) -> str:
        return f"{MANY_SHOT}:{self.plan.shots or 'all'}:{self.plan.draws}"

    def identity(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "prompts": manyshot.PROMPT_FORMAT,
            "train": labelled.identity(self.data.train),
            "test": labelled.identity(self.data.test),
            "seed": self.plan.seed,
            "limit": self.limit,
            "batch_tokens": self.batch_tokens,
        }

    def run(self, model: LanguageModel, tokenizer: Any, reference: States | None, progress: Progress) -> dict[str, Any]:
        outcome = manyshot.evaluate(model, tokenizer, self.data, self.plan, self.limit, self.batch_tokens, progress)
        score = estimate(outcome.correct)
        # An item flips where it has one answer.
        answers: dict[str, Any] = {"values": outcome.correct, "choices_by_draw": outcome.choices}
        if self.plan.draws == 1:
            answers = {"values": [int(right) for right in outcome.correct], "choices": outcome.choices[0]}
        return answers | {
            "metric": "acc",
            "score": score.mean,
            "n": score.n,
            "acc": score.mean,
            "acc_se": score.se,
            "labels": outcome.right,
            "classes": list(outcome.labels),
            "shots": outcome.shots,
            "tokens": outcome.tokens,
            "by_draw": outcome.by_draw,
        }


@dataclass(frozen=True)
class Harness(_Batched):
    """A task of lm-eval, scored by our scorer."""

    task: str
    limit: int | None
    batch_tokens: int

    @property
    def name(self) -> str:
        return HARNESS_PREFIX + self.task

    def identity(self) -> dict[str, Any]:
        settings = {"name": self.name, "limit": self.limit, "batch_tokens": self.batch_tokens}
        return settings | harness.task_identity(self.task)

    def run(self, model: LanguageModel, tokenizer: Any, reference: States | None, progress: Progress) -> dict[str, Any]:
        return harness.run_task(model, tokenizer, self.task, self.limit, self.batch_tokens, progress)


def make_tasks(options: SweepOptions) -> list[Task]:
    """The tasks that the options name, their items and text read.

    Raises:
        UsageError: an unknown task, or items or text that cannot be read; all of them are named.
        MissingDependencyError: a harness task without lm-eval.
    """
    tasks: list[Task] = []
    faults = []
    for name in dict.fromkeys(options.tasks):
        try:
            tasks.append(_make_task(name, options))
        except UsageError as error:
            faults.append(str(error))
    if faults:
        raise UsageError("; ".join(dict.fromkeys(faults)))
    return tasks


def _make_task(name: str, options: SweepOptions) -> Task:
    if name == "hellaswag":
        return HellaSwag(hellaswag.load_items(options.items, options.limit), options.batch_tokens)
    if name == "perplexity":
        text = corpus.load_text(options.text, options.characters)
        return Perplexity(text, options.window, options.stride, options.batch_tokens)
    if name.startswith(HARNESS_PREFIX) and name != HARNESS_PREFIX:
        harness.require_lm_eval()
        return Harness(name.removeprefix(HARNESS_PREFIX), options.limit, options.batch_tokens)
    if name.split(":")[0] == NEEDLE:
        text = corpus.load_text(options.text)
        return Needle(text, _needle_plan(name, options), options.limit, options.batch_tokens)
    if name.split(":")[0] == MANY_SHOT:
        return _many_shot(name, options)
    raise UsageError(
        f"unknown task {name!r}; known are hellaswag, perplexity, needle[:N[:R]], many-shot:SHOTS[:DRAWS] and "
        "lm-eval:NAME"
    )


def _needle_plan(name: str, options: SweepOptions) -> needle.Plan:
    counts = name.split(":")[1:]
    if len(counts) > 2 or not all(count.isdecimal() for count in counts):
        raise UsageError(f"cannot read task {name!r}: expected needle[:N[:R]], such as needle:4:2")
    needles, asked = (*map(int, counts), 1, 1)[:2]
    return needle.Plan(needles, asked, options.lengths)


def _many_shot(name: str, options: SweepOptions) -> ManyShot:
    found = _MANY_SHOT_NAME.fullmatch(name)
    if found is None:
        raise UsageError(f"cannot read task {name!r}: expected many-shot:SHOTS[:DRAWS], such as many-shot:48 or :all:5")
    shots, draws = found.groups(default="1")
    plan = manyshot.Plan(None if shots == "all" else int(shots), int(draws))
    if options.train is None:
        raise UsageError(f"{name} needs labelled texts: give --train FILE and --test FILE")
    data = labelled.load(options.train, options.test, options.fine)
    plan.check(data)
    return ManyShot(data, plan, options.limit, options.batch_tokens)
