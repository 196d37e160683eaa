"""Perplexity of a text as a task, with the KL divergence from the 16-bit model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from diffquant.evals.columns import FAILED, MISSING, Column, Columns, Compared, Drawn, Metric, kl_text
from diffquant.evals.defaults import STRIDE
from diffquant.evals.stats import mean_interval
from diffquant.evals.task import CHARACTERS, TEXT, WINDOW, Task, TaskOption, at_least_one
from diffquant.evals.task_result import TaskResult
from diffquant.evals.tasks import register
from diffquant.support.plain_data import JsonObject
from diffquant.support.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from diffquant.evals.language_model import LanguageModel, States

_NUMBERS = ("perplexity", "bits_per_byte", "kl", "kl_low", "kl_high")


_STRIDE = TaskOption("stride", STRIDE, "Number of tokens from one window to the next.", int)


def _numbers(compared: Compared) -> JsonObject:
    details = compared.result.details if compared.result else {}
    bounds = {}
    # Results of earlier versions have no windows, and one window has no interval.
    if len(details.get("kl_by_window", [])) > 1:
        kl = mean_interval(details["kl_by_window"], details["tokens_by_window"])
        bounds = {"kl_low": kl.low, "kl_high": kl.high}
    return {name: (details | bounds).get(name) for name in _NUMBERS}


def _kl(compared: Compared) -> Drawn | None:
    """KL with its interval over windows; 16 bits have none."""
    numbers = _numbers(compared)
    kl = numbers["kl"]
    if kl is None:
        return None
    return Drawn(kl, *(kl if numbers[end] is None else numbers[end] for end in ("kl_low", "kl_high")))


def _perplexity_text(compared: Compared) -> str:
    return FAILED if compared.result is None else f"{_numbers(compared)['perplexity']:.4g}"


_NOTE = (
    "KL is the mean of KL(16 bits || quantized) over next-token distributions, in nats; plots have its 95 % "
    "interval over windows of the text."
)

# How well a text was predicted.
TEXT_COLUMNS = Columns(
    table=(
        Column("ppl", _perplexity_text),
        Column("KL", lambda compared: f"{kl.value:.2g}" if (kl := _kl(compared)) else MISSING),
    ),
    changes=(Metric("KL from 16 bits, nats", _kl, lambda change: f"KL {kl_text(change)}", is_log=True),),
    score=None,
    record=_numbers,
    notes=lambda _: [_NOTE],
    by_item=False,
    has_own_names=False,
)


@register
@dataclass(frozen=True, kw_only=True)
class Perplexity(Task):
    """Perplexity of a text in windows.

    Attributes:
        text: text that is read.
        window, stride: number of tokens seen at once, and from one window to the next.
    """

    kind: ClassVar = "perplexity"
    usage: ClassVar = "perplexity"
    options: ClassVar = (TEXT, CHARACTERS, WINDOW, _STRIDE)
    columns: ClassVar = TEXT_COLUMNS
    compares_with_16_bits: ClassVar = True

    text: str
    window: int
    stride: int

    @classmethod
    def parse(cls, name: str, values: Mapping[str, object], batch_tokens: int) -> Self:
        from diffquant.evals.protocols.perplexity import check_windows
        from diffquant.text.corpus import load_text

        if name != cls.kind:
            raise cls.misread(name)
        window, stride = WINDOW.of(values), _STRIDE.of(values)
        check_windows(window, stride)
        text = load_text(TEXT.of(values), at_least_one(CHARACTERS, values))
        return cls(text=text, window=window, stride=stride, batch_tokens=batch_tokens)

    def identity(self) -> JsonObject:
        from diffquant.text.corpus import text_digest

        return {
            "name": self.name,
            "text": text_digest(self.text),
            "characters": len(self.text),
            "window": self.window,
            "stride": self.stride,
            "batch_tokens": self.batch_tokens,
        }

    def run(
        self,
        model: "LanguageModel",
        tokenizer: "PreTrainedTokenizerBase",
        reference: "States | None",
        progress: Progress,
    ) -> TaskResult:
        from diffquant.evals.protocols.perplexity import score_text

        score = score_text(
            model, tokenizer, self.text, self.window, self.stride, self.batch_tokens, reference, progress
        )
        return TaskResult(
            metric="perplexity",
            details={
                "perplexity": score.perplexity,
                "bits_per_byte": score.bits_per_byte,
                "kl": score.kl,
                "tokens": score.tokens,
                "tokens_by_window": score.tokens_by_window,
                "nll_by_window": score.nll_by_window,
                "kl_by_window": score.kl_by_window,
                "text_bytes": score.text_bytes,
            },
        )

    def reference(self, model: "LanguageModel", tokenizer: "PreTrainedTokenizerBase", progress: Progress) -> "States":
        from diffquant.evals.protocols.perplexity import reference_of

        return reference_of(model, tokenizer, self.text, self.window, self.stride, self.batch_tokens, progress)
