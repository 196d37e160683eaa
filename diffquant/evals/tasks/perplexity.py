"""Perplexity of a text as a task, with the KL divergence from the 16-bit model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from diffquant.evals.defaults import CHARACTERS_PER_TOKEN, STRIDE
from diffquant.evals.task import CHARACTERS, TEXT, WINDOW, Task, TaskOption, at_least_one
from diffquant.evals.task_result import TaskResult
from diffquant.evals.tasks import register
from diffquant.evals.text_columns import TEXTS
from diffquant.support.plain_data import JsonObject
from diffquant.support.progress import Progress

if TYPE_CHECKING:
    from diffquant.evals.language_model import LanguageModel, States

_STRIDE = TaskOption("stride", STRIDE, "Number of tokens from one window to the next.", int)


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
    columns: ClassVar = TEXTS
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

    @property
    def tokens(self) -> int:
        # Windows overlap, and where there is one alone it is no longer than the text.
        read = len(self.text) // CHARACTERS_PER_TOKEN
        return read if read <= self.window else read * self.window // self.stride

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

    def run(self, model: "LanguageModel", reference: "States | None", progress: Progress) -> TaskResult:
        from diffquant.evals.protocols.perplexity import score_text

        score = score_text(model, self.text, self.window, self.stride, self.batch_tokens, reference, progress)
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

    def reference(self, model: "LanguageModel", progress: Progress) -> "States":
        from diffquant.evals.protocols.perplexity import reference_of

        return reference_of(model, self.text, self.window, self.stride, self.batch_tokens, progress)
