"""How a difference in vocabulary logits shows in tokens: Kullback-Leibler divergence and the likeliest token."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from diffquant.evals.stats import wilson_interval

_AT_ONCE = 16


@dataclass(frozen=True)
class TokenComparison:
    """Next tokens of one model compared with those of another, position by position.

    Attributes:
        n: number of positions.
        agreement: share of positions with the same likeliest token.
        low, high: 95 % interval of `agreement`.
        kl_mean: mean divergence over the positions, in nats.
        kl_largest: largest divergence at a position, in nats.
    """

    n: int
    agreement: float
    low: float
    high: float
    kl_mean: float
    kl_largest: float

    def __str__(self) -> str:
        return (
            f"same likeliest token at {self.agreement:.1%} of {self.n} positions (95 % interval {self.low:.1%} to "
            f"{self.high:.1%}), KL {self.kl_mean:.1e} nats in the mean, {self.kl_largest:.1e} at most"
        )


def compare_tokens(pairs: Iterable[tuple[Tensor, Tensor]]) -> TokenComparison:
    """Compare what a model predicts with what its reference does.

    Args:
        pairs: logits of the reference and of the model, [1, T, V] each, a pair for each sequence.
    """
    divergences, same = [], []
    # A few positions at a time: of a large vocabulary, copies in float64 take long to come by.
    rows = (zip(*(x.flatten(0, -2).split(_AT_ONCE) for x in pair), strict=True) for pair in pairs)
    for reference, model in chain.from_iterable(rows):
        wanted, got = reference.double().log_softmax(-1), model.double().log_softmax(-1)
        # Rounding can make a divergence of nothing negative.
        divergences.append((wanted.exp() * (wanted - got)).sum(-1).clamp(min=0).flatten())
        same.append((reference.argmax(-1) == model.argmax(-1)).flatten())
    kl, agreements = torch.cat(divergences), torch.cat(same)
    agreed = int(agreements.sum())
    low, high = wilson_interval(agreed, len(agreements))
    return TokenComparison(len(agreements), agreed / len(agreements), low, high, float(kl.mean()), float(kl.max()))
