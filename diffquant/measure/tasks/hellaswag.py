"""HellaSwag as a task.

It has two more sensitive measures of change from 16 bits than the score. KL is never negative, so its effects do not
cancel over items and few items show a change; it does not say whether the model became worse. An item's margin is the
log-probability per character of its right ending minus that of the likeliest wrong one: it has a sign, and changes even
when the choice does not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from diffquant.measure.results import ITEMS, Metric, TaskResult, format_interval, format_kl, interval_fields
from diffquant.measure.stats import Difference, mean_interval
from diffquant.measure.task import CHARACTERS_PER_TOKEN, LIMIT, Task, TaskOption, read_positive_option
from diffquant.measure.tasks import register
from diffquant.support.plain_data import JsonObject
from diffquant.support.progress import Progress

if TYPE_CHECKING:
    from diffquant.measure.language_model import LanguageModel, ModelOutputs
    from diffquant.measure.protocols.hellaswag import HellaSwagItem

_ITEMS = TaskOption[Path | None]("items", None, "HellaSwag items as JSONL; by default the bundled 1,000.", Path)


# Number of characters per unit of a shown margin: about the length of an ending.
_CHARACTERS = 100


def _margin(result: TaskResult | None, baseline: TaskResult | None) -> Difference | None:
    """Return the mean change of the items' margins, in nats per 100 characters."""
    now, before = (each.details.get("margins") if each else None for each in (result, baseline))
    if now is None or before is None:
        return None
    return mean_interval([_CHARACTERS * (a - b) for a, b in zip(now, before, strict=True)])


def _kl(result: TaskResult | None, _: object = None) -> Difference | None:
    """Return the mean KL over the tokens of right endings, in nats, with its interval over items."""
    details = result.details if result else {}
    return mean_interval(details["kl_by_item"], details["tokens_by_item"]) if "kl_by_item" in details else None


MARGIN = Metric(
    "margin [95 %]",
    lambda *results: format_interval(_margin(*results), "+.2f"),
    f"change of the margin,\nnats per {_CHARACTERS} characters",
    _margin,
    lambda change: f"margin {format_interval(change, '+.2f')} nats per {_CHARACTERS} characters",
    required_detail="margins",
)
KL = Metric(
    "KL [95 %]",
    lambda *results: format_kl(_kl(*results)),
    "KL from 16 bits, nats",
    _kl,
    lambda change: f"KL {format_kl(change)}",
    is_log=True,
    required_detail="margins",
)


def _record(result: TaskResult | None, baseline: TaskResult | None) -> JsonObject:
    return {
        "margin": result.details.get("margin") if result else None,
        **interval_fields("margin_change", _margin(result, baseline), per=_CHARACTERS),
        **interval_fields("kl", _kl(result)),
        **ITEMS.record(result, baseline),
    }


def _notes(results: Sequence[TaskResult]) -> list[str]:
    if not any("margins" in result.details for result in results):
        return ITEMS.notes(results)
    return [
        "KL is the mean of KL(16 bits || quantized) over the tokens of right endings, in nats. The margin is how "
        "much likelier an item's right ending is than its likeliest wrong one; the table has its mean change from "
        f"16 bits, in nats per {_CHARACTERS} characters.",
        *ITEMS.notes(results),
    ]


# Results older than margins have only the score.
MARGINS = replace(ITEMS, metrics=(KL, MARGIN, *ITEMS.metrics), record=_record, notes=_notes, named_alone=False)


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
        from diffquant.measure.protocols.hellaswag import load_items

        if name != cls.kind:
            raise cls.make_name_error(name)
        items = load_items(_ITEMS.value_in(values), read_positive_option(LIMIT, values))
        return cls(items=tuple(items), batch_tokens=batch_tokens)

    @property
    def total_tokens(self) -> int:
        return sum(len(item.query) + sum(map(len, item.endings)) for item in self.items) // CHARACTERS_PER_TOKEN

    def identity(self) -> JsonObject:
        from diffquant.measure.protocols.hellaswag import hellaswag_digest

        return {
            "name": self.name,
            "shots": 0,
            "n": len(self.items),
            "items": hellaswag_digest(self.items),
            "batch_tokens": self.batch_tokens,
        }

    def run(self, model: "LanguageModel", reference: "ModelOutputs | None", progress: Progress) -> TaskResult:
        from diffquant.measure.protocols.hellaswag import evaluate_hellaswag

        return evaluate_hellaswag(model, self.items, self.batch_tokens, progress, reference)

    def compute_reference(self, model: "LanguageModel", progress: Progress) -> "ModelOutputs":
        from diffquant.measure.protocols.hellaswag import compute_reference

        return compute_reference(model, self.items, self.batch_tokens, progress)
