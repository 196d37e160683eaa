"""Attention of the last position of a sequence, logits rounded as the model rounds them: linear in the context."""

from dataclasses import replace

import torch
from torch import Tensor

from diffquant.attention.logits import from_coded, magnitudes, prepare_logits, round_logits, to_coded
from diffquant.attention.operands import rounded_operands
from diffquant.family.heads import HeadLayout, each_pairs_noise
from diffquant.family.spec import DiffSpec
from diffquant.model.cache import PackedCache
from diffquant.model.modeling import DiffLayer, TransformerWalk
from diffquant.model.walk import CAUSAL, causal_logits
from diffquant.numbers.logit_scales import logit_scale
from diffquant.numbers.rotation import rotated
from diffquant.scheme import FULL, Scheme


def last_weights(walk: TransformerWalk, layer: DiffLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Weights that the last position gives each position's value, under the model's recipe.

    Args:
        walk: walk over the model.
        layer: layer whose attention it is.
        x: [1, T, D] the layer's input.

    Returns:
        [maps, h, T], each map's softmax, and [h, T], the weights: map 1 - λ·map 2, or the only map; a gated
        map 1 is multiplied by its gate.
    """
    attention = layer.self_attn
    normed = layer.input_layernorm(x)
    q, k, v = attention.project(normed, walk.rotary)
    if attention.key_rotation is not None:
        q, k = rotated(q, attention.key_rotation), rotated(k, attention.key_rotation)
    if walk.model.model.has_quantized_cache:
        cache = PackedCache(walk.model.recipe, len(walk.layers), walk.model.model.ranges)
        k, _ = cache.update(k, v, attention.layer)
    if attention.qk.quantizes:
        q, k = rounded_operands(q, k, CAUSAL, attention.qk)
    maps = last_maps(q, k, attention.spec, attention.logits, attention.logit_ranges)
    gate, lam = attention.signal_gate(normed[:, -1:]), attention.lam(normed[:, -1:])
    signal = maps[0] if gate is None else gate.reshape(-1, 1) * maps[0]
    return maps, signal if lam is None else signal - lam.reshape(-1, 1) * maps[1]


def last_maps(q: Tensor, k: Tensor, spec: DiffSpec, scheme: Scheme = FULL, ranges: Tensor | None = None) -> Tensor:
    """Softmax of each map at the last query.

    Args:
        q: [1, query heads, T, d] rotated queries in canonical order.
        k: [1, key heads, T, d] rotated keys in canonical order.
        spec: member of the family that the model is.
        scheme: scheme of the logits.
        ranges: [query heads] ranges of a static scheme.

    Returns:
        float32 [maps, h, T].
    """
    layout, length = spec.layout, q.shape[2]
    if spec.signals_per_noise > 1:
        q, ranges = _with_own_noise(q, layout), None if ranges is None else _with_own_noise(ranges[None], layout)[0]
        spec = replace(spec, signals_per_noise=1)
        layout = spec.layout
    largest = q.new_zeros(1, q.shape[1], 1, length, dtype=torch.float32)
    for first, logits in causal_logits(q, k, spec, _first_sharing_query(scheme, length)):
        queries, keys = logits.shape[-2:]
        visible = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(first)
        prepared = prepare_logits(logits, visible, scheme.shift)
        # In place: `prepared` then holds what is rounded.
        to_coded(layout.query_maps(prepared), scheme)
        largest_seen = largest[..., :keys]
        torch.maximum(largest_seen, prepared.abs().amax(-2, keepdim=True), out=largest_seen)
    last = list(layout.query_maps(prepared[..., -1:, :]))
    if scheme.quantizes:
        # A column's largest magnitude stands for all queries that share a scale with the last one.
        tops = magnitudes(layout.query_maps(largest), scheme, ranges)
        rounded = [
            round_logits(logits, logit_scale(top, scheme.format, scheme.shift), scheme)
            for logits, top in zip(last, tops, strict=True)
        ]
        last = from_coded(rounded, scheme)
    return torch.cat(last).squeeze(-2).softmax(-1)


def _with_own_noise(heads: Tensor, layout: HeadLayout) -> Tensor:
    """Heads [1, 2·h, ...] in which each pair has a noise head of its own, from [1, query heads, ...]."""
    return torch.cat([each_pairs_noise(of_map, layout.pairs) for of_map in layout.query_maps(heads)], 1)


def _first_sharing_query(scheme: Scheme, length: int) -> int:
    """Position of the first query whose logits the last one's scale depends on."""
    if scheme.sharing.spans_rows:
        return 0
    tile = scheme.sharing.tile or 1
    return (length - 1) // tile * tile
