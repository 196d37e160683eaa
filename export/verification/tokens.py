"""Next-token predictions of an exported model compared with its torch reference's."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from diffquant.measure.stats import wilson_interval

_AT_ONCE = 16


@dataclass(frozen=True)
class TokenComparison:
    """Next-token predictions of a model compared with its reference's, position by position.

    Attributes:
        n: number of positions.
        agreement: fraction of positions with the same top-1 token.
        low, high: 95 % confidence interval of `agreement`.
        kl_mean: mean KL divergence over the positions, in nats.
        kl_largest: largest KL divergence at a position, in nats.
    """

    n: int
    agreement: float
    low: float
    high: float
    kl_mean: float
    kl_largest: float

    def __str__(self) -> str:
        return (
            f"same top-1 token at {self.agreement:.1%} of {self.n} positions (95 % interval {self.low:.1%} to "
            f"{self.high:.1%}), mean KL {self.kl_mean:.1e} nats, largest {self.kl_largest:.1e}"
        )


def compare_tokens(pairs: Iterable[tuple[Tensor, Tensor]]) -> TokenComparison:
    """Compare a model's next-token predictions with its reference's.

    Args:
        pairs: for each sequence, the reference's logits and the model's logits, [1, T, vocabulary] each.
    """
    divergences, same = [], []
    # A few positions at a time: float64 copies of all logits of a large vocabulary are slow to allocate.
    rows = (zip(*(x.flatten(0, -2).split(_AT_ONCE) for x in pair), strict=True) for pair in pairs)
    for reference, model in chain.from_iterable(rows):
        wanted, got = reference.double().log_softmax(-1), model.double().log_softmax(-1)
        # Rounding can make a divergence near 0 negative.
        divergences.append((wanted.exp() * (wanted - got)).sum(-1).clamp(min=0).flatten())
        same.append((reference.argmax(-1) == model.argmax(-1)).flatten())
    kl, agreements = torch.cat(divergences), torch.cat(same)
    agreed = int(agreements.sum())
    low, high = wilson_interval(agreed, len(agreements))
    return TokenComparison(len(agreements), agreed / len(agreements), low, high, float(kl.mean()), float(kl.max()))


def has_lower_agreement(tokens: Mapping[str, TokenComparison]) -> bool:
    """Return whether the first session agrees less often with the reference than the second session does.

    Args:
        tokens: comparison of each session by name; with fewer than two, the result is false.
    """
    agreements = [each.agreement for each in tokens.values()]
    return len(agreements) > 1 and agreements[0] < agreements[1]
