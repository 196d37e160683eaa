"""The protocol of perplexity: how well a text is predicted in windows, and the mean KL divergence from another model.

The text follows one BOS (or EOS) token, and every one of its tokens is predicted once. Windows have one
length, so they batch without padding; each but the first predicts its last `stride` tokens.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import mul
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diffquant.errors import NonFiniteError, UsageError
from diffquant.evals.defaults import BATCH_TOKENS, STRIDE, WINDOW
from diffquant.evals.divergence import kl_by_position
from diffquant.evals.language_model import LanguageModel, States, joined
from diffquant.evals.scoring import token_scores
from diffquant.support.progress import Progress, silent
from diffquant.support.spelling import spelled
from diffquant.text.tokens import encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TextScore:
    """How well a text was predicted.

    Attributes:
        nll: summed negative log-likelihood in nats.
        tokens, text_bytes: number of tokens, and of UTF-8 bytes, that it sums over.
        kl: mean KL(reference ‖ this model) of the next-token distributions in nats; None without a reference.
        tokens_by_window, nll_by_window, kl_by_window: tokens that each window predicts, and the means over them in
            nats; no KL without a reference.
    """

    nll: float
    tokens: int
    text_bytes: int
    kl: float | None = None
    tokens_by_window: list[int] = field(default_factory=list)
    nll_by_window: list[float] = field(default_factory=list)
    kl_by_window: list[float] = field(default_factory=list)

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        return self.nll / math.log(2) / self.text_bytes


@torch.inference_mode()
def score_text(
    model: LanguageModel,
    tokenizer: "PreTrainedTokenizerBase",
    text: str,
    window: int = WINDOW,
    stride: int = STRIDE,
    batch_tokens: int = BATCH_TOKENS,
    reference: States | None = None,
    progress: Progress = silent,
) -> TextScore:
    """Perplexity of a text, and KL from a reference over the same text and windows.

    Args:
        reference: states of another model, from `reference_of`.

    Raises:
        UsageError: the text is too short, or window and stride do not fit.
        NonFiniteError: the model's logits are not finite.
    """
    tokens = encode_text(tokenizer, text, model.device)
    counts: list[int] = []
    nll: list[float] = []
    kl: list[float] = []
    done = 0
    for states, targets in _predictions(model, tokens, window, stride, batch_tokens):
        logprobs, _ = token_scores(states, targets.unsqueeze(1))
        counts.append(len(states))
        nll.append(-float(logprobs.mean(dtype=torch.float64)))
        if reference is not None:
            kl.append(float(kl_by_position(reference[done : done + len(states)], states).mean()))
        done += len(states)
        progress(done, len(tokens) - 1, "reading")
    nll_sum = sum(map(mul, counts, nll))
    if not math.isfinite(nll_sum):
        raise NonFiniteError(f"the model computes NaN or infinity; use {spelled('dtype', 'float32')}, or wider bits")
    mean_kl = sum(map(mul, counts, kl)) / done if kl else None
    return TextScore(nll_sum, done, len(text.encode()), mean_kl, counts, nll, kl)


@torch.inference_mode()
def reference_of(
    model: LanguageModel,
    tokenizer: "PreTrainedTokenizerBase",
    text: str,
    window: int = WINDOW,
    stride: int = STRIDE,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress = silent,
) -> States:
    """A model's states at every predicted token of a text, which `score_text` compares other models with.

    Raises:
        UsageError: the text is too short, or window and stride do not fit.
    """
    tokens = encode_text(tokenizer, text, model.device)
    parts: list[States] = []
    for states, _ in _predictions(model, tokens, window, stride, batch_tokens):
        parts.append(states)
        progress(sum(map(len, parts)), len(tokens) - 1, "reading with the 16-bit model")
    return joined(parts)


def check_windows(window: int, stride: int) -> None:
    """Check that windows cover the text.

    Raises:
        UsageError: the stride would skip tokens, or nothing would be read.
    """
    if not 1 <= stride <= window:
        raise UsageError(f"stride {stride} must be between 1 and the window, {window} tokens")


def _predictions(
    model: LanguageModel, tokens: Tensor, window: int, stride: int, batch_tokens: int
) -> Iterator[tuple[States, Tensor]]:
    """A model's predictions in the text's order: states of P positions, and the token [P] that follows each."""
    check_windows(window, stride)
    window = min(window, len(tokens) - 1, model.max_length(None))
    stride = min(stride, window)
    spans = list(_spans(len(tokens) - 1, window, stride))
    rows = max(1, batch_tokens // window)
    for first in range(0, len(spans), rows):
        batch = spans[first : first + rows]
        ids = torch.stack([tokens[end - window : end + 1] for end, _ in batch])
        states = model.read(ids[:, :-1])
        for index, (row, (_, scored)) in enumerate(zip(ids, batch, strict=True)):
            yield states[index][window - scored :], row[len(row) - scored :]


def _spans(count: int, window: int, stride: int) -> Iterator[tuple[int, int]]:
    """(end, tokens scored) of each window over `count` predictions; a window reads `window` tokens before end."""
    end = window
    yield end, window
    while end < count:
        scored = min(stride, count - end)
        end += scored
        yield end, scored
