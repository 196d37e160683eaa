"""Multi-needle retrieval as a task."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Self

from diffquant.measure.results import ITEMS, TaskResult
from diffquant.measure.stats import standard_error
from diffquant.measure.task import LIMIT, NEEDLE_LENGTHS, TEXT, Task, TaskOption, read_positive_option
from diffquant.measure.tasks import register
from diffquant.support.names import split_numbers
from diffquant.support.plain_data import JsonObject
from diffquant.support.progress import Progress

if TYPE_CHECKING:
    from diffquant.measure.language_model import LanguageModel, ModelOutputs
    from diffquant.measure.protocols.needle import NeedlePlan


LENGTHS = TaskOption[tuple[int, ...]](
    "lengths",
    NEEDLE_LENGTHS,
    "Lengths of needle prompts in tokens, such as 256,1K,4K.",
    str,
    written="256",
    read=partial(split_numbers, "lengths", example="1024,4096"),
)


@register
@dataclass(frozen=True, kw_only=True)
class Needle(Task):
    """Retrieval of numbers hidden in prose; the items depend on the tokenizer.

    Attributes:
        text: prose in which the numbers are hidden.
        plan: settings that determine the items.
        limit: number of items to measure, or None to take all.
    """

    kind: ClassVar = "needle"
    usage: ClassVar = "needle[:N[:R]]"
    options: ClassVar = (LIMIT, TEXT, LENGTHS)
    columns: ClassVar = ITEMS

    text: str
    plan: "NeedlePlan"
    limit: int | None

    @classmethod
    def parse(cls, name: str, values: Mapping[str, object], batch_tokens: int) -> Self:
        from diffquant.checkpoints.texts import load_text
        from diffquant.measure.protocols.needle import NeedlePlan

        counts = name.split(":")[1:]
        if len(counts) > 2 or not all(re.fullmatch("[0-9]{1,9}", count) for count in counts):
            raise cls.make_name_error(name, "needle:4:2")
        needles, asked = (*map(int, counts), 1, 1)[:2]
        # A length that is given twice would count the same items twice.
        plan = NeedlePlan(needles, asked, tuple(dict.fromkeys(LENGTHS.value_in(values))))
        text = load_text(TEXT.value_in(values))
        return cls(text=text, plan=plan, limit=read_positive_option(LIMIT, values), batch_tokens=batch_tokens)

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.plan.needles}:{self.plan.asked}"

    @property
    def total_tokens(self) -> int:
        return sum(self.plan.item_lengths[: self.limit])

    def identity(self) -> JsonObject:
        from diffquant.checkpoints.texts import text_digest
        from diffquant.measure.protocols.needle import ITEMS_FORMAT

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

    def run(self, model: "LanguageModel", reference: "ModelOutputs | None", progress: Progress) -> TaskResult:  # noqa: ARG002
        from diffquant.measure.protocols import needle

        items, retrieved = needle.evaluate_needle(model, self.text, self.plan, self.limit, self.batch_tokens, progress)
        score = sum(retrieved) / len(retrieved)
        return TaskResult(
            metric="retrieved",
            score=score,
            n=len(items),
            values=retrieved,
            details={
                "retrieved": score,
                "retrieved_se": standard_error(retrieved),
                "items": needle.needle_digest(items),
                "by_place": needle.compute_accuracy_grid(items, retrieved),
            },
        )
