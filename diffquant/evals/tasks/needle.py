"""Multi-needle retrieval as a task."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from diffquant.evals.columns import ITEMS
from diffquant.evals.defaults import LENGTHS
from diffquant.evals.plots.places import plot_places
from diffquant.evals.stats import estimate
from diffquant.evals.task import LIMIT, TEXT, Task, TaskOption, at_least_one
from diffquant.evals.task_result import TaskResult
from diffquant.evals.tasks import register
from diffquant.support.comma_lists import split_numbers
from diffquant.support.plain_data import JsonObject
from diffquant.support.progress import Progress

if TYPE_CHECKING:
    from diffquant.evals.language_model import LanguageModel, States
    from diffquant.evals.protocols.needle import NeedlePlan


def _read_lengths(text: str) -> tuple[int, ...]:
    return split_numbers("lengths", text, "1024,4096")


_LENGTHS = TaskOption[tuple[int, ...]](
    "lengths",
    LENGTHS,
    "Lengths of needle prompts in tokens, such as 256,1K,4K.",
    str,
    written=",".join(map(str, LENGTHS)),
    read=_read_lengths,
)


@register
@dataclass(frozen=True, kw_only=True)
class Needle(Task):
    """Retrieval of numbers hidden in prose; the items depend on the tokenizer.

    Attributes:
        text: prose that the numbers are hidden in.
        plan: plan of the items.
        limit: number of items; None for all.
    """

    kind: ClassVar = "needle"
    usage: ClassVar = "needle[:N[:R]]"
    options: ClassVar = (LIMIT, TEXT, _LENGTHS)
    columns: ClassVar = ITEMS
    plots: ClassVar = {"places.png": plot_places}

    text: str
    plan: "NeedlePlan"
    limit: int | None

    @classmethod
    def parse(cls, name: str, values: Mapping[str, object], batch_tokens: int) -> Self:
        from diffquant.evals.protocols.needle import NeedlePlan
        from diffquant.text.corpus import load_text

        counts = name.split(":")[1:]
        if len(counts) > 2 or not all(re.fullmatch("[0-9]{1,9}", count) for count in counts):
            raise cls.misread(name, "needle:4:2")
        needles, asked = (*map(int, counts), 1, 1)[:2]
        # Of a length that is named twice the items would be the same, and count as twice as many.
        plan = NeedlePlan(needles, asked, tuple(dict.fromkeys(_LENGTHS.of(values))))
        text = load_text(TEXT.of(values))
        return cls(text=text, plan=plan, limit=at_least_one(LIMIT, values), batch_tokens=batch_tokens)

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.plan.needles}:{self.plan.asked}"

    @property
    def tokens(self) -> int:
        return sum(self.plan.item_lengths[: self.limit])

    def identity(self) -> JsonObject:
        from diffquant.evals.protocols.needle import ITEMS_FORMAT
        from diffquant.text.corpus import text_digest

        return {
            "name": self.name,
            "items": ITEMS_FORMAT,
            "text": text_digest(self.text),
            "lengths": list(self.plan.lengths),
            "samples": self.plan.samples,
            "seed": self.plan.seed,
            "limit": self.limit,
            "batch_tokens": self.batch_tokens,
        }

    def run(self, model: "LanguageModel", reference: "States | None", progress: Progress) -> TaskResult:  # noqa: ARG002
        from diffquant.evals.protocols import needle

        items, retrieved = needle.evaluate_needle(model, self.text, self.plan, self.limit, self.batch_tokens, progress)
        score = estimate(retrieved)
        return TaskResult(
            metric="retrieved",
            score=score.mean,
            n=score.n,
            values=retrieved,
            details={
                "retrieved": score.mean,
                "retrieved_se": score.se,
                "items": needle.needle_digest(items),
                "by_place": needle.by_place(items, retrieved),
            },
        )
