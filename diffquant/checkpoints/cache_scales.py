"""Scales of a calibrated float cache, stored with the weights: one for the keys and one for the values of each layer.

compressed-tensors, and so transformers and vLLM, read them as `self_attn.k_scale` and `v_scale` where config.json has a
`kv_cache_scheme`. A scale is a power of two, so that keys and values divided by it are exact in every dtype.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from diffquant.checkpoints.compressed_config import has_own_kv_cache_scheme
from diffquant.checkpoints.reader import Checkpoint
from diffquant.errors import CheckpointError
from diffquant.model.adapters import Adapter
from diffquant.recipe import Recipe
from diffquant.recipe.numbers.formats import format_named
from diffquant.recipe.scheme import Scheme

_CACHE = Scheme.parse("e4m3:static")
_LARGEST = format_named("e4m3").largest


def can_engines_use_cache(recipe: Recipe) -> bool:
    """Return whether engines can use a recipe's cache.

    All keys and values must have the scheme `e4m3:static`, and `residual` must be 0: no tokens are kept at 16 bits.
    """
    return recipe.schemes_of("k") == recipe.schemes_of("v") == {_CACHE} and not recipe.residual


def scale_names(adapter: Adapter) -> dict[str, str]:
    """Return the tensor name of each cache scale in a checkpoint, by the name of its range, such as "layers.0.k"."""
    layers = range(adapter.architecture.num_hidden_layers)
    modules = {n: adapter.source_name(f"model.layers.{n}.self_attn.k_proj.weight").rsplit(".", 2)[0] for n in layers}
    return {f"layers.{n}.{target}": f"{modules[n]}.{target}_scale" for n in layers for target in ("k", "v")}


def compute_scales(adapter: Adapter, ranges: Mapping[str, Tensor]) -> dict[str, float]:
    """Return one cache scale for each calibrated range, by the scale's tensor name in the checkpoint.

    A scale is the least power of two for which the range's largest magnitude / scale is at most 448, e4m3's largest
    value.
    """
    names = scale_names(adapter)
    exponents = {names[key]: torch.log2(tensor.max().double() / _LARGEST).ceil() for key, tensor in ranges.items()}
    return {name: float(2.0**exponent) for name, exponent in exponents.items()}


def read_stored_ranges(checkpoint: Checkpoint, adapter: Adapter) -> dict[str, Tensor]:
    """Return the calibrated ranges that a checkpoint's cache scales give, by name; empty if it has no such scales.

    Raises:
        CheckpointError: a scale is not finite and above zero.
    """
    if not has_own_kv_cache_scheme(checkpoint.config):
        return {}
    rows, ranges = adapter.architecture.cached_shapes, dict[str, Tensor]()
    for key, name in scale_names(adapter).items():
        scale = checkpoint.read(name).float()
        if not bool(torch.isfinite(scale) & (scale > 0)):
            raise CheckpointError(f"{checkpoint.path}: {name} is {scale.item()}; a scale must be a number above zero")
        _, layer, target = key.split(".")
        shape = rows[int(layer)].keys if target == "k" else rows[int(layer)].values
        ranges[key] = (scale * _LARGEST).expand(shape)
    return ranges
