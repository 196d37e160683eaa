"""Strided perplexity of a text, and the mean KL divergence of its next-token distributions.

The text follows one BOS (or EOS) token, and every one of its tokens is predicted once. Windows have one
length, so they batch without padding; each but the first predicts its last `stride` tokens.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from diffquant.errors import NonFiniteError, UsageError
from diffquant.evals.scoring import BATCH_TOKENS, token_scores
from diffquant.support.progress import Progress, silent
from diffquant.text.tokens import encode, max_length

WINDOW = 1024
STRIDE = 512
# Entries of float32 vocabulary logits that KL holds of each model at once: 32 MiB.
_KL_ENTRIES = 1 << 23


@dataclass(frozen=True)
class TextScore:
    """How well a text was predicted.

    Attributes:
        nll: summed negative log-likelihood in nats.
        tokens, text_bytes: what it sums over.
        kl: mean KL(reference ‖ this model) of the next-token distributions in nats; None without one.
    """

    nll: float
    tokens: int
    text_bytes: int
    kl: float | None = None

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        return self.nll / math.log(2) / self.text_bytes


@dataclass(frozen=True)
class Reference:
    """A model's next-token distributions over a text, kept as what its head turns into them.

    Attributes:
        hidden: [N, D] last hidden states at every predicted token, in order.
        head: [V, D] the head's weight; None where the states are logits.
    """

    hidden: Tensor
    head: Tensor | None


@torch.inference_mode()
def evaluate(
    model: Any,
    tokenizer: Any,
    text: str,
    window: int = WINDOW,
    stride: int = STRIDE,
    batch_tokens: int = BATCH_TOKENS,
    reference: Reference | None = None,
    progress: Progress = silent,
) -> TextScore:
    """Perplexity of a text, and KL from a reference over the same text and windows.

    Raises:
        UsageError: the text is too short, or window and stride do not fit.
        NonFiniteError: the model's logits are not finite.
    """
    tokens = encode(model, tokenizer, text)
    nll, kl, done = 0.0, 0.0, 0
    for hidden, targets in _predictions(model, tokens, window, stride, batch_tokens):
        logprobs, _ = token_scores(model, hidden, targets.unsqueeze(1))
        nll -= float(logprobs.sum(dtype=torch.float64))
        if reference is not None:
            kl += _kl_sum(reference.hidden[done : done + len(hidden)], reference.head, hidden, _head(model))
        done += len(hidden)
        progress(done, len(tokens) - 1, "reading")
    if not math.isfinite(nll):
        raise NonFiniteError("the model computes NaN or infinity; use --dtype float32, or wider bits")
    return TextScore(nll, done, len(text.encode()), kl / done if reference is not None else None)


@torch.inference_mode()
def reference_of(
    model: Any,
    tokenizer: Any,
    text: str,
    window: int = WINDOW,
    stride: int = STRIDE,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress = silent,
) -> Reference:
    """What `evaluate` compares other models with; holds [N, D] states, no logits.

    Raises:
        UsageError: the text is too short, or window and stride do not fit.
    """
    tokens = encode(model, tokenizer, text)
    states: list[Tensor] = []
    for hidden, _ in _predictions(model, tokens, window, stride, batch_tokens):
        states.append(hidden)
        progress(sum(map(len, states)), len(tokens) - 1, "reading with the 16-bit model")
    return Reference(torch.cat(states), _head(model))


def next_token_kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(P ‖ Q) in nats of each row's softmax over the whole vocabulary; float32 [N, V] in, [N] out."""
    p, q = p_logits.log_softmax(-1), q_logits.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def check_windows(window: int, stride: int) -> None:
    """Check that windows cover the text.

    Raises:
        UsageError: the stride would skip tokens, or nothing would be read.
    """
    if not 1 <= stride <= window:
        raise UsageError(f"stride {stride} must be between 1 and the window, {window} tokens")


def _predictions(
    model: Any, tokens: Tensor, window: int, stride: int, batch_tokens: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of (hidden [P, D], the token each predicts [P]), in the text's order."""
    check_windows(window, stride)
    window = min(window, len(tokens) - 1, max_length(model.config, None))
    stride = min(stride, window)
    spans = list(_spans(len(tokens) - 1, window, stride))
    rows = max(1, batch_tokens // window)
    for first in range(0, len(spans), rows):
        batch = spans[first : first + rows]
        ids = torch.stack([tokens[end - window : end + 1] for end, _ in batch])
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        for states, row, (_, scored) in zip(hidden, ids, batch, strict=True):
            yield states[window - scored :], row[len(row) - scored :]


def _spans(count: int, window: int, stride: int) -> Iterator[tuple[int, int]]:
    """(end, tokens scored) of each window over `count` predictions; a window reads `window` tokens before end."""
    end = window
    yield end, window
    while end < count:
        step = min(stride, count - end)
        end += step
        yield end, step


def _head(model: Any) -> Tensor | None:
    """The head's weight; None for a model whose head passes logits on."""
    return getattr(model.lm_head, "weight", None)


def _kl_sum(p_hidden: Tensor, p_head: Tensor | None, q_hidden: Tensor, q_head: Tensor | None) -> float:
    """Summed over positions. Logits are float32 whatever the models are: half types would round them as
    coarsely as 8-bit quantization moves them."""
    total = 0.0
    rows = max(1, _KL_ENTRIES // (p_hidden.shape[-1] if p_head is None else len(p_head)))
    for p, q in zip(p_hidden.split(rows), q_hidden.split(rows), strict=True):
        total += float(next_token_kl(_wide_logits(p, p_head), _wide_logits(q, q_head)).sum(dtype=torch.float64))
    return total


def _wide_logits(hidden: Tensor, head: Tensor | None) -> Tensor:
    """float32 [N, V], the head widened a part at a time."""
    if head is None:
        return hidden.float()
    part = max(1, _KL_ENTRIES // head.shape[1])
    return torch.cat([linear(hidden.float(), rows.float()) for rows in head.split(part)], -1)
