"""Next-token distributions, whole or their likeliest tokens alone, and the KL divergence between two of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

# llama.cpp leaves out tokens whose stored log-probability is not above this, where rounding is all that is left.
_LEAST_STORED = -16.0
# A server's log-probabilities are float32, so that what they leave for all other tokens is known to about this.
_LEAST_REST = 1e-7


@dataclass(frozen=True)
class Whole:
    """Distributions over the whole vocabulary at P positions.

    Attributes:
        logs: log-probabilities [P, V] in float32.
        is_stored: whether they were read from llama.cpp's file, whose small ones are only known to be small.
    """

    logs: Tensor
    is_stored: bool = False

    @property
    def top(self) -> Tensor:
        """The likeliest token [P]."""
        return self.logs.argmax(-1)

    def of(self, tokens: Tensor) -> Tensor:
        """Log-probabilities [P] of tokens [P]."""
        return self.logs.gather(1, tokens[:, None])[:, 0]


@dataclass(frozen=True)
class Likeliest:
    """The likeliest tokens at P positions, and perhaps others; all that is left is one bin.

    Attributes:
        ids: tokens [P, K], the likeliest first.
        logs: their log-probabilities [P, K] in float32; -inf where a position has fewer.
        k: how many of the likeliest each position has.
    """

    ids: Tensor
    logs: Tensor
    k: int

    @property
    def top(self) -> Tensor:
        return self.ids.gather(1, self.logs.argmax(-1, keepdim=True))[:, 0]

    def of(self, tokens: Tensor) -> Tensor:
        """Log-probabilities [P] of tokens [P]; NaN where one is not among those that are known."""
        is_it = (self.ids == tokens[:, None]) & self.logs.isfinite()
        found = self.logs.masked_fill(~is_it, -torch.inf).amax(-1)
        return found.masked_fill(~is_it.any(-1), torch.nan)


Distributions = Whole | Likeliest


def divergence(p: Distributions, q: Distributions) -> Tensor:
    """KL(P ‖ Q) in nats at each position, float64 [P].

    Where one side is known by its likeliest tokens, all others count as one bin. Merging outcomes never raises a KL
    divergence, so the result is a lower bound then.
    """
    if isinstance(p, Whole):
        if isinstance(q, Likeliest):
            return _binned(p.logs.gather(1, q.ids).masked_fill(q.logs.isneginf(), -torch.inf), q.logs)
        weights = p.logs.exp()
        if p.is_stored:
            weights = weights.masked_fill(p.logs <= _LEAST_STORED, 0.0)
        return (weights * (p.logs - q.logs)).double().sum(-1)
    if isinstance(q, Whole):
        return _binned(p.logs, q.logs.gather(1, p.ids).masked_fill(p.logs.isneginf(), -torch.inf))
    is_same = (p.ids[:, :, None] == q.ids[:, None]) & p.logs.isfinite()[:, :, None] & q.logs.isfinite()[:, None]
    theirs = q.logs[:, None].expand_as(is_same).masked_fill(~is_same, -torch.inf).amax(-1)
    return _binned(p.logs.masked_fill(~is_same.any(-1), -torch.inf), theirs)


def _binned(p_logs: Tensor, q_logs: Tensor) -> Tensor:
    """KL [P] over K tokens, with log-probabilities [P, K] under both, -inf for none, and one bin for all others."""
    p, q = p_logs.double().exp(), q_logs.double().exp()
    known = torch.where(p > 0, p * (p_logs.double() - q_logs.double()), 0.0).sum(-1)
    p_rest = (1 - p.sum(-1)).clamp_min(0.0)
    q_rest = (1 - q.sum(-1)).clamp_min(_LEAST_REST)
    return known + torch.xlogy(p_rest, p_rest / q_rest)
