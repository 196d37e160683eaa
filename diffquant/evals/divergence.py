"""KL divergence of next-token distributions from another model's, over a text or over continuations under `score`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from diffquant.evals.language_model import States

# Float32 vocabulary logits to hold at once for each model: 32 MiB.
_KL_ENTRIES = 1 << 23


def next_token_kl(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(P ‖ Q) in nats at each position, of softmaxes over the vocabulary; float32 [N, V] in, [N] out."""
    p, q = p_logits.log_softmax(-1), q_logits.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def kl_by_position(p: States, q: States) -> Tensor:
    """KL(P ‖ Q) in nats at each of N positions, float64 [N], from logits in float32."""
    rows = max(1, _KL_ENTRIES // p.vocabulary)
    parts = zip(p.split(rows), q.split(rows), strict=True)
    return torch.cat([next_token_kl(a.exact_logits(), b.exact_logits()).double() for a, b in parts])


class KlMeter:
    """KL divergence of a model's next-token distributions from another's; pass `see` to `score` as `watch`.

    Args:
        reference: states of the other model for these requests.
        lengths: number of tokens of each measured request by its index, in the reference's order.
    """

    def __init__(self, reference: States, lengths: Mapping[int, int]) -> None:
        self._reference = reference
        self._lengths = lengths
        self._starts = dict(zip(lengths, accumulate(lengths.values(), initial=0), strict=False))
        self._seen: Counter[int] = Counter()
        self._sums = dict.fromkeys(lengths, 0.0)

    def see(self, owners: Sequence[int], states: States) -> None:
        measured = [row for row, owner in enumerate(owners) if owner in self._starts]
        if not measured:
            return
        places = []
        for row in measured:
            owner = owners[row]
            places.append(self._starts[owner] + self._seen[owner])
            self._seen[owner] += 1
        kl = kl_by_position(self._reference[torch.tensor(places)], states[torch.tensor(measured)])
        for row, value in zip(measured, kl.tolist(), strict=True):
            self._sums[owners[row]] += value

    def means(self) -> list[float]:
        """Mean KL(reference ‖ model) over the tokens of each measured request, in nats."""
        return [self._sums[owner] / length for owner, length in self._lengths.items()]
