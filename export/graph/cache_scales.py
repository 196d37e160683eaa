"""Computes the op's static scales of a quantized KV cache from calibrated ranges."""

import numpy as np
import torch
from torch import Tensor

from diffquant.export.graph.latents import latent_widths, op_spec
from diffquant.export.graph.matrix import op_layout
from diffquant.numbers.absmax import max_code
from diffquant.recipe import Recipe
from diffquant.source.ranges import Ranges
from diffquant.source.source import Source

# k_scale and v_scale of a layer, float32 [1, h_kv, 1, dk] and [1, h_kv, 1, dv].
Scales = tuple[np.ndarray, np.ndarray]


def static_scales(source: Source, bits: int, ranges: Ranges) -> dict[int, Scales]:
    """Scales of each layer's cache, by the layer's number.

    Args:
        source: checkpoint that is exported.
        bits: width of the cache's codes.
        ranges: ranges calibrated on this checkpoint.

    Raises:
        UsageError: the ranges hold no keys or no values, or were clipped for another width.
    """
    ranges.check(Recipe.of(kv=f"{bits}:static"))
    orders = state_order(source)
    shape = (1, op_spec(source.architecture).kv_pairs, 1, -1)
    scales = {}
    for layer in source.architecture.token_rows:
        k, v = (ranges.tensors[f"layers.{layer}.{target}"] for target in ("k", "v"))
        rows = (
            [_to_op_order(x, order) / max_code(bits) for x, order in zip((k, v), orders, strict=True)]
            if latent_widths(source.architecture) is None
            else _latent_scales(k, v, bits)
        )
        scales[layer] = (rows[0].reshape(shape), rows[1].reshape(shape))
    return scales


def _latent_scales(turned: Tensor, latent: Tensor, bits: int) -> list[np.ndarray]:
    """Scales of a latent as a key and as a value: one code of each channel is both."""
    of_latent, of_turned = (x.flatten().numpy() / max_code(bits) for x in (latent, turned))
    return [np.concatenate([of_latent, of_turned]), np.concatenate([of_latent, np.ones_like(of_turned)])]


def state_order(source: Source) -> tuple[Tensor, Tensor]:
    """Places of the model's keys [key heads, d] and values [h_kv, dv] in an exported layer's flat cache rows."""
    if widths := latent_widths(source.architecture):
        latent, turned = widths
        return torch.arange(latent, latent + turned)[None], torch.arange(latent)[None]
    layout, exported = source.spec.layout, op_layout(source.spec)
    places = []
    for projection in ("k_proj", "v_proj"):
        order = layout.order_as(exported, projection)
        places.append(torch.arange(layout.height(projection)) if order is None else order.argsort())
    keys, values = layout.keys(places[0][None]), layout.values(places[1][None])
    return keys.squeeze(-2), values.squeeze(-2)


def _to_op_order(ranges: Tensor, order: Tensor) -> np.ndarray:
    """DiffTransformer's ranges as one row in the exported cache's order."""
    flat = np.empty(order.numel(), np.float32)
    flat[order.flatten().numpy()] = ranges.flatten().numpy()
    return flat
