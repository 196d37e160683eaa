"""The protocol of perplexity of a text in windows, and of the mean KL divergence from another model.

The text follows one BOS (or EOS) token, and each of its tokens is predicted once. Windows have one length, so they
batch without padding; all but the first predict their last `stride` tokens.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import mul

import torch
from torch import Tensor

from diffquant.errors import NonFiniteError, UsageError
from diffquant.evals.defaults import BATCH_TOKENS, STRIDE, WINDOW
from diffquant.evals.divergence import kl_by_position
from diffquant.evals.language_model import LanguageModel, States, joined, require_finite
from diffquant.evals.scoring import token_scores
from diffquant.support.progress import Progress, silent
from diffquant.text.tokens import encode_text


@dataclass(frozen=True)
class TextScore:
    """A text's summed loss, and KL from a reference.

    Attributes:
        nll: summed negative log-likelihood in nats.
        tokens, text_bytes: number of tokens, and of UTF-8 bytes, in the sum.
        kl: mean KL(reference ‖ this model) of the next-token distributions in nats; None if there is no reference.
        tokens_by_window, nll_by_window, kl_by_window: number of tokens that each window predicts, and the means over
            them in nats; no KL if there is no reference.
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
        """The exponential of the mean loss.

        Raises:
            NonFiniteError: it is beyond all numbers.
        """
        loss = self.nll / self.tokens
        try:
            return math.exp(loss)
        except OverflowError:
            raise NonFiniteError(
                f"no number holds a perplexity of {loss:,.0f} nats per token; the model's weights or recipe are broken"
            ) from None

    @property
    def bits_per_byte(self) -> float:
        return self.nll / math.log(2) / self.text_bytes


@torch.inference_mode()
def score_text(
    model: LanguageModel,
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
    tokens = encode_text(model.tokenizer, text, model.vocabulary, model.device)
    counts: list[int] = []
    nll: list[float] = []
    kl: list[float] = []
    done = 0
    for ids, scored in _windows(model, tokens, window, stride, batch_tokens):
        for states, targets in _by_window(model.read(ids[:, :-1]), ids, scored):
            logprobs, _ = token_scores(states, targets.unsqueeze(1))
            counts.append(len(states))
            nll.append(-float(logprobs.mean(dtype=torch.float64)))
            if reference is not None:
                kl.append(float(kl_by_position(reference[done : done + len(states)], states).mean()))
            done += len(states)
            progress(done, len(tokens) - 1, "reading")
    nll_sum = sum(map(mul, counts, nll))
    require_finite(torch.tensor(nll_sum))
    mean_kl = sum(map(mul, counts, kl)) / done if kl else None
    return TextScore(nll_sum, done, len(text.encode()), mean_kl, counts, nll, kl)


@torch.inference_mode()
def reference_of(
    model: LanguageModel,
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
    tokens = encode_text(model.tokenizer, text, model.vocabulary, model.device)
    parts: list[States] = []
    for ids, scored in _windows(model, tokens, window, stride, batch_tokens):
        parts += [states for states, _ in _by_window(model.read(ids[:, :-1]), ids, scored)]
        progress(sum(map(len, parts)), len(tokens) - 1, "reading with the 16-bit model")
    return joined(parts)


def check_windows(window: int, stride: int) -> None:
    """Check that windows cover the text.

    Raises:
        UsageError: the stride would skip tokens, or nothing would be read.
    """
    if not 1 <= stride <= window:
        raise UsageError(f"stride {stride} must be between 1 and the window, {window} tokens")


def _windows(
    model: LanguageModel, tokens: Tensor, window: int, stride: int, batch_tokens: int
) -> Iterator[tuple[Tensor, list[int]]]:
    """Passes over the text in order: windows [B, T + 1], each with the next token, and how many tokens it scores."""
    check_windows(window, stride)
    window = min(window, len(tokens) - 1, model.max_length)
    spans = list(_spans(len(tokens) - 1, window, min(stride, window)))
    rows = max(1, batch_tokens // window)
    for first in range(0, len(spans), rows):
        ends, scored = zip(*spans[first : first + rows], strict=True)
        yield torch.stack([tokens[end - window : end + 1] for end in ends]), list(scored)


def _by_window(states: States, ids: Tensor, scored: list[int]) -> Iterator[tuple[States, Tensor]]:
    """For each window the states of the P positions that it scores, and the token [P] that follows each."""
    for index, (row, count) in enumerate(zip(ids, scored, strict=True)):
        yield states[index][len(row) - 1 - count :], row[len(row) - count :]


def _spans(count: int, window: int, stride: int) -> Iterator[tuple[int, int]]:
    """(end, tokens scored) of each window over `count` predictions; a window reads `window` tokens before end."""
    end = window
    yield end, window
    while end < count:
        scored = min(stride, count - end)
        end += scored
        yield end, scored
