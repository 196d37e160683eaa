"""Attention seen while a model reads: its logits, how far their rounding moves its output, and noise put in.

The rounding error of a pair's two maps is weighed by how much noise on the first, on the second and on both alike
moves the predictions: KL from the exact model is quadratic in small noise.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from diffquant.attention.logits import (
    from_mean_and_difference,
    largest_magnitudes,
    mask_and_shift_logits,
    round_logits,
    softmax_weights,
    to_mean_and_difference,
)
from diffquant.errors import UsageError
from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm, pair_norm
from diffquant.measure.scoring import next_token_kl
from diffquant.model.attention import DiffAttention
from diffquant.model.modeling import DiffTransformer
from diffquant.recipe.numbers.simulation import logit_format
from diffquant.recipe.scheme import Scheme

# Small enough that KL is quadratic in it, large enough to stand far above float32's own noise.
SIGMA = 0.1
# How much of the same noise goes into each map's logits.
NOISES = {"first": (1.0, 0.0), "second": (0.0, 1.0), "both": (1.0, 1.0)}


@dataclass(frozen=True)
class Reading:
    """Sequences of one length, and how many of their last tokens are predicted.

    Attributes:
        ids: token ids [B, T + 1]; each but the first may be predicted from those before it.
        scored: number of tokens at the end that are predicted, 1 to T.
    """

    ids: Tensor
    scored: int

    def predictions(self, model: DiffTransformer) -> Tensor:
        """Vocabulary logits [B, scored, V] in float32."""
        hidden = model.model(input_ids=self.ids[:, :-1], use_cache=False).last_hidden_state
        logits: Tensor = model.lm_head(hidden[:, -self.scored :]).float()
        return logits

    def nll(self, predictions: Tensor) -> Tensor:
        """Negative log-likelihood [B] of the predicted tokens, in nats a token."""
        targets = self.ids[:, -self.scored :]
        return cross_entropy(predictions.mT, targets, reduction="none").mean(1)


@dataclass(frozen=True)
class SeenAttention:
    """One layer's attention over some sequences.

    Attributes:
        layer: number of the layer.
        logits: logits [B, h, T, S] of each map.
        visible: mask of the keys that each query sees; None if it sees all.
        values: values [B, h, S, dv].
        lam, post: λ and norm, as in `DiffAttention`.
    """

    layer: int
    logits: list[Tensor]
    visible: Tensor | None
    values: Tensor
    lam: Tensor | None
    post: PairNorm | None

    @classmethod
    def of(cls, module: DiffAttention, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Mask) -> "SeenAttention":
        spec = module.spec
        q, k, v = module.project(x, rotary)
        layout = spec.layout
        repeats = spec.pairs // spec.kv_pairs
        logits = [
            queries @ keys.repeat_interleave(repeats, 1).mT * spec.scale
            for queries, keys in zip(layout.split_query_maps(q), layout.split_key_maps(k), strict=True)
        ]
        visible = mask.dense(q.shape[2], k.shape[2], q.device)
        return cls(
            module.layer,
            logits,
            visible,
            v.repeat_interleave(repeats, 1),
            module.compute_lam(x),
            module.pair_norm_settings(),
        )

    def terms(self, logits: Sequence[Tensor]) -> list[Tensor]:
        """Terms [B, h, T, dv] of the output for some logits: A1·V and, of a pair, λ·A2·V."""
        weighed = [softmax_weights(of_map, self.visible) @ self.values for of_map in logits]
        return weighed if self.lam is None else [weighed[0], self.lam * weighed[1]]

    def rounded(self, scheme: Scheme) -> tuple[list[Tensor], list[Tensor]]:
        """Scales of what a scheme rounds (each map, or what stands for them), and each map's logits after it."""
        prepared = [
            mask_and_shift_logits(logits.clone(), self.visible, scheme.has_transform("shift")) for logits in self.logits
        ]
        coded = to_mean_and_difference(prepared, scheme)
        tops = largest_magnitudes(coded, scheme)
        scales = [logit_format(scheme.format, scheme.has_transform("shift")).scale_for_largest(top) for top in tops]
        rounded = [round_logits(logits, scale, scheme) for logits, scale in zip(coded, scales, strict=True)]
        # Where all is zero nothing is rounded, whatever the scale.
        used = [torch.where(top == 0, 0.0, scale) for top, scale in zip(tops, scales, strict=True)]
        return used, from_mean_and_difference(rounded, scheme)


@contextmanager
def observed(
    model: DiffTransformer, see: Callable[[SeenAttention], Tensor | None], layers: slice = slice(None)
) -> Iterator[None]:
    """Show `see` every layer's attention while open; what it returns stands for the pairs' outputs [B, h, T, dv].

    Raises:
        UsageError: signals have gates (V3), which `SeenAttention` does not know.
    """
    if any(module.spec.lam == "two-gates" for module in model.attention_modules):
        raise UsageError("attention whose signals have gates cannot be observed")

    def hook(module: Any, arguments: Any, output: Tensor) -> Tensor | None:
        x, rotary, mask, _ = arguments
        attention = SeenAttention.of(module, x, rotary, mask)
        pairs = see(attention)
        if pairs is None:
            return None
        y = pair_norm(pairs, attention.post).transpose(1, 2).flatten(2)
        if module.spec.output_gate:
            y = y * module.output_gate_proj(x).sigmoid()
        projected: Tensor = module.o_proj(y)
        return projected

    handles = [module.register_forward_hook(hook) for module in model.attention_modules[layers]]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class RoundingError:
    """Error that rounding under one scheme makes in one layer's output, summed as it is seen."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme
        self.squares = torch.zeros(4, dtype=torch.float64)
        self.variances: list[list[float]] = []

    def add(self, seen: SeenAttention, exact: Tensor) -> None:
        """Add the error of one attention; `exact` is the pairs' output of the logits as they are."""
        scales, logits = seen.rounded(self.scheme)
        self.variances.append([float(scale.square().mean()) / 12 for scale in scales])
        moved = difference(seen.terms(logits))
        compared = [(moved, exact), (pair_norm(moved, seen.post), pair_norm(exact, seen.post))]
        self.squares += torch.stack([x for a, b in compared for x in (_squares(a - b), _squares(b))]).cpu()

    def summary(self) -> dict[str, Any]:
        """Sums as statistics.

        Returns:
            "variance": variance of a uniform error as wide as the scale, of each thing that is rounded;
            "before_norm", "after_norm": root mean square error of the pairs' outputs over theirs.
        """
        before, exact, after, normed = self.squares.tolist()
        return {
            "variance": _means(self.variances),
            "before_norm": (before / exact) ** 0.5,
            "after_norm": (after / normed) ** 0.5,
        }


def difference(terms: Sequence[Tensor]) -> Tensor:
    """Output of pairs [B, h, T, dv] from its terms: A1·V - λ·A2·V, or A·V."""
    return terms[0] if len(terms) == 1 else terms[0] - terms[1]


def layers_of(model: DiffTransformer, readings: Sequence[Reading], schemes: Sequence[Scheme]) -> list[dict[str, Any]]:
    """Statistics of every layer: largest logits, a row's mean spread, λ, cancellation, what each rounding does."""
    seen_by = [_Layer(schemes) for _ in model.attention_modules]

    def see(attention: SeenAttention) -> None:
        seen_by[attention.layer].add(attention)

    with observed(model, see):
        for reading in readings:
            reading.predictions(model)
    return [layer.summary() for layer in seen_by]


class _Layer:
    def __init__(self, schemes: Sequence[Scheme]) -> None:
        self.errors = {str(scheme): RoundingError(scheme) for scheme in schemes}
        self.top: list[list[float]] = []
        self.spread: list[list[float]] = []
        self.lams: list[Tensor] = []
        self.squares = torch.zeros(2, dtype=torch.float64)

    def add(self, seen: SeenAttention) -> None:
        terms = seen.terms(seen.logits)
        exact = difference(terms)
        hidden = [mask_and_shift_logits(logits.clone(), seen.visible, False) for logits in seen.logits]
        below = [mask_and_shift_logits(logits.clone(), seen.visible, True) for logits in seen.logits]
        self.top.append([float(logits.abs().max()) for logits in hidden])
        self.spread.append([float(-logits.amin(-1).mean()) for logits in below])
        if seen.lam is not None:
            self.lams.append(seen.lam.flatten())
        squares = torch.stack([torch.stack([_squares(term) for term in terms]).sum(), _squares(exact)])
        self.squares += squares.cpu()
        for error in self.errors.values():
            error.add(seen, exact)

    def summary(self) -> dict[str, Any]:
        terms, exact = self.squares.tolist()
        lam = torch.cat(self.lams) if self.lams else None
        return {
            "largest": [max(of_map) for of_map in zip(*self.top, strict=True)],
            "mean_spread_of_rows": _means(self.spread),
            "lam": None
            if lam is None
            else {"mean": float(lam.mean()), "min": float(lam.min()), "max": float(lam.max())},
            "cancellation": (terms / exact) ** 0.5,
            "errors": {name: error.summary() for name, error in self.errors.items()},
        }


def predictions_of(model: DiffTransformer, readings: Sequence[Reading]) -> list[Tensor]:
    """Vocabulary logits [B, scored, V] of every reading."""
    return [reading.predictions(model) for reading in readings]


def losses(readings: Sequence[Reading], predictions: Sequence[Tensor]) -> list[float]:
    """Negative log-likelihood of every sequence, in nats a token."""
    return [float(x) for reading, logits in zip(readings, predictions, strict=True) for x in reading.nll(logits)]


def divergences(exact: Sequence[Tensor], moved: Sequence[Tensor]) -> list[float]:
    """Mean KL(exact ‖ moved) in nats of every sequence."""
    return [
        float(kl)
        for p, q in zip(exact, moved, strict=True)
        for kl in next_token_kl(p.flatten(0, 1), q.flatten(0, 1)).view(len(p), -1).mean(1)
    ]


def sensitivity(
    model: DiffTransformer, readings: Sequence[Reading], exact: Sequence[Tensor], layer: int, shares: Sequence[float]
) -> float:
    """Sensitivity of a model: KL a unit of variance of normal noise, independent between entries, on a layer's logits.

    Args:
        shares: factor of the noise in each map's logits; it is the same noise.
    """
    generator = torch.Generator().manual_seed(layer)

    def see(attention: SeenAttention) -> Tensor:
        noise = SIGMA * torch.randn(attention.logits[0].shape, generator=generator).to(attention.logits[0])
        # One map has the first share.
        logits = [of_map + share * noise for of_map, share in zip(attention.logits, shares, strict=False)]
        return difference(attention.terms(logits))

    with observed(model, see, slice(layer, layer + 1)):
        kl_by_sequence = divergences(exact, predictions_of(model, readings))
    return sum(kl_by_sequence) / len(kl_by_sequence) / SIGMA**2


def _squares(x: Tensor) -> Tensor:
    return x.square().sum(dtype=torch.float64)


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(column) for column in zip(*rows, strict=True)]
