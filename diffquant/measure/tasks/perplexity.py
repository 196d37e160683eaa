"""Perplexity of a text as a task, with the mean KL divergence from the 16-bit model. No torch at the top.

The text follows one BOS (or EOS) token, and each of its tokens is predicted once. Windows have one length, so they
batch without padding; all but the first predict their last `stride` tokens.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import mul
from typing import TYPE_CHECKING, ClassVar, Self

from diffquant.errors import NonFiniteError, UsageError
from diffquant.measure.results import FAILED, MISSING, Columns, Metric, TaskResult, format_kl
from diffquant.measure.stats import Difference, mean_interval
from diffquant.measure.task import (
    BATCH_TOKENS,
    CHARACTERS,
    CHARACTERS_PER_TOKEN,
    STRIDE,
    TEXT,
    WINDOW,
    Task,
    read_positive_option,
)
from diffquant.measure.tasks import register
from diffquant.support.plain_data import JsonObject
from diffquant.support.progress import Progress, report_nothing

if TYPE_CHECKING:
    from torch import Tensor

    from diffquant.measure.language_model import LanguageModel, ModelOutputs


_NUMBERS = ("perplexity", "bits_per_byte", "kl", "kl_low", "kl_high")


def _numbers(result: TaskResult | None, _: object = None) -> JsonObject:
    details = result.details if result else {}
    bounds = {}
    # Results of earlier versions have no windows, and a single window has no interval.
    if len(details.get("kl_by_window", [])) > 1:
        kl = mean_interval(details["kl_by_window"], details["tokens_by_window"])
        bounds = {"kl_low": kl.low, "kl_high": kl.high}
    return {name: (details | bounds).get(name) for name in _NUMBERS}


def _kl(result: TaskResult | None, _: object = None) -> Difference | None:
    """Return KL with its interval over windows, or None at 16 bits."""
    numbers = _numbers(result)
    kl = numbers["kl"]
    if kl is None:
        return None
    return Difference(kl, *(kl if numbers[end] is None else numbers[end] for end in ("kl_low", "kl_high")))


def _kl_text(result: TaskResult | None, _: object) -> str:
    kl = _kl(result)
    return f"{kl.mean:.2g}" if kl else MISSING


_NOTE = (
    "KL is the mean of KL(16 bits || quantized) over next-token distributions, in nats; plots have its 95 % "
    "interval over windows of the text."
)

# Perplexity of a text.
TEXTS = Columns(
    metrics=(
        Metric("ppl", lambda result, _: f"{result.details['perplexity']:.4g}" if result else FAILED),
        Metric("KL", _kl_text, "KL from 16 bits, nats", _kl, lambda change: f"KL {format_kl(change)}", is_log=True),
    ),
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
        text: text to score.
        window: number of tokens in a window.
        stride: number of tokens from one window to the next.
    """

    kind: ClassVar = "perplexity"
    usage: ClassVar = "perplexity"
    options: ClassVar = (TEXT, CHARACTERS, WINDOW, STRIDE)
    columns: ClassVar = TEXTS
    compares_with_16_bits: ClassVar = True

    text: str
    window: int
    stride: int

    @classmethod
    def parse(cls, name: str, values: Mapping[str, object], batch_tokens: int) -> Self:
        from diffquant.checkpoints.texts import load_text

        if name != cls.kind:
            raise cls.make_name_error(name)
        window, stride = WINDOW.value_in(values), STRIDE.value_in(values)
        check_text_windows(window, stride)
        text = load_text(TEXT.value_in(values), read_positive_option(CHARACTERS, values))
        return cls(text=text, window=window, stride=stride, batch_tokens=batch_tokens)

    @property
    def total_tokens(self) -> int:
        # Windows overlap; a single window is no longer than the text.
        read = len(self.text) // CHARACTERS_PER_TOKEN
        return read if read <= self.window else read * self.window // self.stride

    def identity(self) -> JsonObject:
        from diffquant.checkpoints.texts import text_digest

        return {
            "name": self.name,
            "text": text_digest(self.text),
            "characters": len(self.text),
            "window": self.window,
            "stride": self.stride,
            "batch_tokens": self.batch_tokens,
        }

    def run(self, model: "LanguageModel", reference: "ModelOutputs | None", progress: Progress) -> TaskResult:
        details = compute_perplexity(model, self.text, self.window, self.stride, self.batch_tokens, reference, progress)
        return TaskResult(metric="perplexity", details=details)

    def compute_reference(self, model: "LanguageModel", progress: Progress) -> "ModelOutputs":
        return compute_reference(model, self.text, self.window, self.stride, self.batch_tokens, progress)


def compute_perplexity(
    model: "LanguageModel",
    text: str,
    window: int = WINDOW.default,
    stride: int = STRIDE.default,
    batch_tokens: int = BATCH_TOKENS,
    reference: "ModelOutputs | None" = None,
    progress: Progress = report_nothing,
) -> JsonObject:
    """Compute the perplexity of a text, and KL from a reference over the same text and windows.

    Args:
        reference: states of another model, from `compute_reference`.

    Returns:
        The details of a task's result. "perplexity" is the exponential of the mean loss in nats, "bits_per_byte" the
        loss in bits per byte of the text. "kl" is the mean KL(reference ‖ model) of the next-token distributions in
        nats, or None if there is no reference. "tokens" is the number of predicted tokens, "text_bytes" the text's
        length in bytes. "tokens_by_window", "nll_by_window" and "kl_by_window" are lists with each window's number of
        predicted tokens, mean loss and mean KL; the last list is empty if there is no reference.

    Raises:
        UsageError: the text is too short, or window and stride do not fit (see `check_text_windows`).
        NonFiniteError: the model's logits are not finite, or the perplexity exceeds the largest float.
    """
    import torch

    from diffquant.measure.language_model import require_finite
    from diffquant.measure.scoring import kl_by_position, token_scores

    counts: list[int] = []
    nll: list[float] = []
    kl: list[float] = []
    done = 0
    with torch.inference_mode():
        for states, targets in _read_windows(model, text, window, stride, batch_tokens, progress, "reading"):
            logprobs, _ = token_scores(states, targets.unsqueeze(1))
            counts.append(len(states))
            nll.append(-float(logprobs.mean(dtype=torch.float64)))
            if reference is not None:
                kl.append(float(kl_by_position(reference[done : done + len(states)], states).mean()))
            done += len(states)
    nll_sum, text_bytes = sum(map(mul, counts, nll)), len(text.encode())
    require_finite(torch.tensor(nll_sum))
    return {
        "perplexity": _perplexity(nll_sum / done),
        "bits_per_byte": nll_sum / math.log(2) / text_bytes,
        "kl": sum(map(mul, counts, kl)) / done if kl else None,
        "tokens": done,
        "tokens_by_window": counts,
        "nll_by_window": nll,
        "kl_by_window": kl,
        "text_bytes": text_bytes,
    }


def _perplexity(loss: float) -> float:
    """Return the exponential of a loss in nats per token.

    Raises:
        NonFiniteError: it exceeds the largest float.
    """
    try:
        return math.exp(loss)
    except OverflowError:
        raise NonFiniteError(
            f"a loss of {loss:,.0f} nats per token has no finite perplexity; check the weights and the recipe"
        ) from None


def compute_reference(
    model: "LanguageModel",
    text: str,
    window: int = WINDOW.default,
    stride: int = STRIDE.default,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress = report_nothing,
) -> "ModelOutputs":
    """Return a reference model's outputs at every scored token of a text, for the KL of other models.

    Raises:
        UsageError: the text is too short, or window and stride do not fit (see `check_text_windows`).
    """
    import torch

    from diffquant.measure.language_model import join_states

    doing = "reading with the 16-bit model"
    with torch.inference_mode():
        read = _read_windows(model, text, window, stride, batch_tokens, progress, doing)
        return join_states([states for states, _ in read])


def check_text_windows(window: int, stride: int) -> None:
    """Check that windows of this length and stride skip no tokens of a text.

    Raises:
        UsageError: the stride is below 1 or above the window's length.
    """
    if not 1 <= stride <= window:
        raise UsageError(f"stride {stride} must be between 1 and the window, {window} tokens")


def _read_windows(
    model: "LanguageModel", text: str, window: int, stride: int, batch_tokens: int, progress: Progress, doing: str
) -> "Iterator[tuple[ModelOutputs, Tensor]]":
    """Yield for each window of a text the states of the P positions that it scores, and the token [P] after each."""
    import torch

    from diffquant.checkpoints.tokens import encode_text
    from diffquant.support.devices import log_once

    tokens = encode_text(model.tokenizer, text, model.vocabulary_size, model.device)
    check_text_windows(window, stride)
    if model.max_length < window != WINDOW.default:
        message = "perplexity reads windows of %s tokens, the model's context, not %s"
        log_once(__name__, logging.WARNING, message, model.max_length, window)
    total, done = len(tokens) - 1, 0
    window = min(window, total, model.max_length)
    spans = list(_spans(total, window, min(stride, window)))
    rows = max(1, batch_tokens // window)
    for first in range(0, len(spans), rows):
        ends, scored = zip(*spans[first : first + rows], strict=True)
        # With the token after each window.
        ids = torch.stack([tokens[end - window : end + 1] for end in ends])
        states = model.compute_outputs(ids[:, :-1])
        for index, count in enumerate(scored):
            yield states[index][window - count :], ids[index, -count:]
            done += count
            progress(done, total, doing)


def _spans(count: int, window: int, stride: int) -> Iterator[tuple[int, int]]:
    """Yield (end, tokens scored) of each window over `count` predictions; a window reads `window` tokens before end."""
    end = window
    yield end, window
    while end < count:
        scored = min(stride, count - end)
        end += scored
        yield end, scored
