"""HellaSwag as a task."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from diffquant.evals.defaults import CHARACTERS_PER_TOKEN
from diffquant.evals.margin_columns import MARGINS
from diffquant.evals.stats import estimate, mean_interval
from diffquant.evals.task import LIMIT, Task, TaskOption, at_least_one
from diffquant.evals.task_result import TaskResult
from diffquant.evals.tasks import register
from diffquant.support.plain_data import JsonObject
from diffquant.support.progress import Progress

if TYPE_CHECKING:
    from diffquant.evals.language_model import LanguageModel, States
    from diffquant.evals.protocols.hellaswag import HellaSwagItem

_ITEMS = TaskOption[Path | None]("items", None, "HellaSwag items as JSONL; by default the 1,000 that ship.", Path)


@register
@dataclass(frozen=True, kw_only=True)
class HellaSwag(Task):
    """HellaSwag: the model picks the likeliest of four endings.

    Attributes:
        items: contexts with their endings, in order.
    """

    kind: ClassVar = "hellaswag"
    usage: ClassVar = "hellaswag"
    options: ClassVar = (LIMIT, _ITEMS)
    columns: ClassVar = MARGINS
    compares_with_16_bits: ClassVar = True

    items: "tuple[HellaSwagItem, ...]"

    @classmethod
    def parse(cls, name: str, values: Mapping[str, object], batch_tokens: int) -> Self:
        from diffquant.evals.protocols.hellaswag import load_items

        if name != cls.kind:
            raise cls.misread(name)
        items = load_items(_ITEMS.of(values), at_least_one(LIMIT, values))
        return cls(items=tuple(items), batch_tokens=batch_tokens)

    @property
    def tokens(self) -> int:
        return sum(len(item.query) + sum(map(len, item.endings)) for item in self.items) // CHARACTERS_PER_TOKEN

    def identity(self) -> JsonObject:
        from diffquant.evals.protocols.hellaswag import hellaswag_digest

        return {
            "name": self.name,
            "shots": 0,
            "n": len(self.items),
            "items": hellaswag_digest(self.items),
            "batch_tokens": self.batch_tokens,
        }

    def run(self, model: "LanguageModel", reference: "States | None", progress: Progress) -> TaskResult:
        from diffquant.evals.protocols import hellaswag

        outcome = hellaswag.evaluate_hellaswag(model, self.items, self.batch_tokens, progress, reference)
        kl = {"kl": mean_interval(outcome.kl, outcome.tokens).mean, "kl_by_item": outcome.kl} if outcome.kl else {}
        acc, acc_norm = estimate(outcome.correct), estimate(outcome.correct_norm)
        return TaskResult(
            metric="acc_norm",
            score=acc_norm.mean,
            n=acc.n,
            values=[int(right) for right in outcome.correct_norm],
            choices=outcome.choices_norm,
            details={
                "acc": acc.mean,
                "acc_se": acc.se,
                "acc_norm": acc_norm.mean,
                "acc_norm_se": acc_norm.se,
                "margin": estimate(outcome.margins).mean,
                "choices_by_sum": outcome.choices,
                "labels": outcome.labels,
                "logprobs": [[round(p, 5) for p in row] for row in outcome.logprobs],
                "margins": outcome.margins,
                "tokens_by_item": outcome.tokens,
            }
            | kl,
        )

    def reference(self, model: "LanguageModel", progress: Progress) -> "States":
        from diffquant.evals.protocols.hellaswag import reference_of

        return reference_of(model, self.items, self.batch_tokens, progress)
