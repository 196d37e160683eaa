"""Loss by position as a task: cumulative average NLL, and the NLL of AR-hits and of other tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from diffquant.errors import UsageError
from diffquant.evals.defaults import CHARACTERS_PER_TOKEN
from diffquant.evals.plots.positions import plot_positions
from diffquant.evals.position_columns import POSITIONS
from diffquant.evals.task import CHARACTERS, TEXT, WINDOW, Task, at_least_one
from diffquant.evals.task_result import TaskResult
from diffquant.evals.tasks import register
from diffquant.support.plain_data import JsonObject
from diffquant.support.progress import Progress

if TYPE_CHECKING:
    from torch import Tensor

    from diffquant.evals.language_model import LanguageModel, States


@register
@dataclass(frozen=True, kw_only=True)
class Nll(Task):
    """Negative log-likelihood of a text's tokens by what stands before them.

    Attributes:
        text: text that is read.
        window: number of tokens in a window; windows do not overlap.

    Source: arXiv 2410.05258, figure 4 (cumulative average NLL by position) and table 6 (AR-hit and others).
    """

    kind: ClassVar = "nll"
    usage: ClassVar = "nll"
    options: ClassVar = (TEXT, CHARACTERS, WINDOW)
    columns: ClassVar = POSITIONS
    plots: ClassVar = {"positions.png": plot_positions}

    text: str
    window: int

    @classmethod
    def parse(cls, name: str, values: Mapping[str, object], batch_tokens: int) -> Self:
        from diffquant.text.corpus import load_text

        if name != cls.kind:
            raise cls.misread(name)
        window = WINDOW.of(values)
        if window < 2:
            raise UsageError(f"nll needs windows of 2 tokens or more, got {window}")
        text = load_text(TEXT.of(values), at_least_one(CHARACTERS, values))
        return cls(text=text, window=window, batch_tokens=batch_tokens)

    @property
    def tokens(self) -> int:
        return len(self.text) // CHARACTERS_PER_TOKEN

    def identity(self) -> JsonObject:
        from diffquant.text.corpus import text_digest

        return {
            "name": self.name,
            "text": text_digest(self.text),
            "characters": len(self.text),
            "window": self.window,
            "batch_tokens": self.batch_tokens,
        }

    def run(self, model: "LanguageModel", reference: "States | None", progress: Progress) -> TaskResult:  # noqa: ARG002
        from diffquant.evals.protocols.positions import cumulative_means, score_positions

        nll, is_hit = score_positions(model, self.text, self.window, self.batch_tokens, progress)
        windows, window = nll.shape
        positions, cumulative = cumulative_means(nll)
        return TaskResult(
            metric="nll",
            details={
                "nll": float(nll.mean()),
                "positions": positions,
                "cumulative_nll": cumulative.mean(0).tolist(),
                "cumulative_nll_by_window": cumulative.tolist(),
                "nll_by_window": nll.mean(1).tolist(),
                "tokens_by_window": [window] * windows,
                "ar_hit_share": float(is_hit.double().mean()),
                **_slice("ar_hit", "ar_hits", nll, is_hit),
                **_slice("other", "others", nll, ~is_hit),
            },
        )


def _slice(name: str, plural: str, nll: "Tensor", chosen: "Tensor") -> JsonObject:
    """Mean NLL of the chosen tokens, over all and in each window, where it is 0 if there are none; how many."""
    counts, sums = chosen.sum(1), (nll * chosen).sum(1)
    return {
        f"{name}_nll": float(sums.sum() / counts.sum()) if counts.any() else None,
        f"{name}_nll_by_window": (sums / counts.clamp(min=1)).tolist(),
        f"{plural}_by_window": counts.tolist(),
    }
