"""What the last position of a sequence attends to, logits rounded as the model rounds them: linear in the context."""

import torch
from torch import Tensor

from diffquant.attention import DiffSpec
from diffquant.attention.logits import magnitudes, prepare_logits, round_logits
from diffquant.model.cache import PackedCache
from diffquant.model.modeling import DiffLayer
from diffquant.model.walk import Walk, causal_logits
from diffquant.numerics.logit_scales import logit_scale
from diffquant.scheme import FULL, Scheme


def weights_of(walk: Walk, layer: DiffLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """What the last position gives each position's value, under the model's recipe.

    Args:
        x: [1, T, D] the layer's input.

    Returns:
        [maps, h, T], each map's softmax, and [h, T], the weights: map 1 - λ·map 2, or the only map.
    """
    attention = layer.self_attn
    normed = layer.input_layernorm(x)
    q, k, v = attention.project(normed, walk.rotary)
    if walk.model.model.has_quantized_cache:
        cache = PackedCache(walk.model.recipe, len(walk.layers), walk.model.model.ranges)
        k, _ = cache.update(k, v, attention.layer)
    maps = last_row(q, k, attention.spec, attention.logits, attention.logit_ranges)
    lam = attention.lam(normed[:, -1:])
    return maps, maps[0] if lam is None else maps[0] - lam.reshape(-1, 1) * maps[1]


def last_row(q: Tensor, k: Tensor, spec: DiffSpec, scheme: Scheme = FULL, ranges: Tensor | None = None) -> Tensor:
    """Each map's softmax at the last query.

    Args:
        q: [1, maps·h, T, d] rotated, first maps before second ones.
        k: [1, key heads, T, d] rotated.
        scheme: of the logits.
        ranges: [maps·h] of a static scheme.

    Returns:
        float32 [maps, h, T].
    """
    length = q.shape[2]
    largest = q.new_zeros(1, q.shape[1], 1, length, dtype=torch.float32)
    for first, logits in causal_logits(q, k, spec, _first_row(scheme, length)):
        rows, keys = logits.shape[-2:]
        visible = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(first)
        prepared = prepare_logits(logits, visible, scheme.shift)
        seen = largest[..., :keys]
        torch.maximum(seen, prepared.abs().amax(-2, keepdim=True), out=seen)
    last = list(prepared[..., -1:, :].chunk(spec.maps, 1))
    if scheme.quantizes:
        # A column's largest magnitude stands for the rows that share a scale with the last one.
        tops = magnitudes(largest.chunk(spec.maps, 1), scheme, ranges)
        last = [round_logits(each, logit_scale(top, scheme), scheme) for each, top in zip(last, tops, strict=True)]
    return torch.cat(last).squeeze(-2).softmax(-1)


def _first_row(scheme: Scheme, length: int) -> int:
    """The first query whose logits the last one's scale depends on."""
    if scheme.granularity in ("tensor", "head", "pair"):
        return 0
    if scheme.granularity == "block":
        size = scheme.size or 1
        return (length - 1) // size * size
    return length - 1
