"""Softmax over visible keys, and its weights rounded before they are divided by their row's sum.

A row's unnormalized weights are exp(logit - the row's largest), so that they lie in [0, 1] and the largest is 1: one
scale a row is the same for all rows, and a format whose scales have a scale of their own knows it beforehand. Weights
are divided by the sum of the rounded ones, so that a row still sums to 1 and errors common to a row cancel
(quantizing before normalizing, AMD-AGI/ALTO #40). Published kernels take the sum of the unrounded ones, which is in
registers before they round: FlashAttention-3 (arXiv 2407.08608; hopper/softmax.h), SageAttention 2 and 3 (arXiv
2411.10958 and 2505.11594) and ModelOpt's p_bmm_quantizer. `fullsum` does that.

Kernels round while the largest logit of a row is still that of the keys read so far. Here it is the row's own.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from diffquant.numbers.formats import NumberFormat
from diffquant.numbers.logit_scales import weight_scale
from diffquant.scheme import FULL, Scheme


def softmax_weights(logits: Tensor, visible: Tensor | None, scheme: Scheme = FULL) -> Tensor:
    """Softmax of [..., S] logits over the visible keys, under a scheme of its weights; 0 for a row that sees none.

    Args:
        logits: [B, heads, T, S].
        visible: bool, broadcastable to them; None if everything is.
        scheme: scheme of the weights: a scale a row, or for each group of `size` keys, counted from the first.

    Returns:
        The weights, which sum to 1 in each row but for `fullsum`'s, in the dtype of the logits.
    """
    masked = logits if visible is None else torch.where(visible, logits, -torch.inf)
    if not scheme.quantizes:
        weights = masked.softmax(-1)
        return weights if visible is None else weights.nan_to_num(0.0)
    if not masked.numel():
        return masked
    largest = masked.amax(-1, keepdim=True)
    weights = (masked - largest.masked_fill(largest == -torch.inf, 0.0)).exp()
    rounded = _rounded(weights, scheme)
    total = (weights if scheme.fullsum else rounded).sum(-1, keepdim=True)
    return rounded / total.masked_fill(total == 0, 1.0)


def _rounded(weights: Tensor, scheme: Scheme) -> Tensor:
    """Unnormalized weights [..., S] as a scheme's codes and scales give them back."""
    if scheme.granularity == "row":
        return _read_back(weights, scheme.format, weight_scale(scheme.format, scheme.pow2, weights.dtype).to(weights))
    number_format = scheme.format.bound_to(torch.ones(1))
    keys, size = weights.shape[-1], scheme.size or 1
    groups = pad(weights, (0, -keys % size)).unflatten(-1, (-1, size))
    return _read_back(groups, number_format, number_format.scale(groups, -1)).flatten(-2)[..., :keys]


def _read_back(x: Tensor, number_format: NumberFormat, scale: Tensor) -> Tensor:
    return number_format.decode(number_format.codes(x, scale), scale)
