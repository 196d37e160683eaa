"""Sizes of what a recipe stores: bytes of the checkpoint that `quantize` would write, bytes of KV cache a token."""

import torch

from diffquant.model.cache import PackedCache
from diffquant.model.modeling import DiffTransformer
from diffquant.quantization.plan import plan_quantization
from diffquant.recipe import Recipe
from diffquant.source.source import Source

_KV_TOKENS = 1024


def weight_bytes(source: Source, recipe: Recipe) -> int:
    """Bytes of all tensors with the recipe's weights packed, scales included."""
    return source.checkpoint.nbytes if source.packed else plan_quantization(source, recipe).bytes_after


def kv_bytes_per_token(model: DiffTransformer) -> float:
    """Bytes that the recipe's cache holds for a token of one sequence, over 1,024 tokens of 16-bit states."""
    spec, layers = model.config.diff_spec, model.config.num_hidden_layers
    # Not the model's own kind of cache: on CUDA that one has room for tokens to come.
    cache = PackedCache(model.recipe, layers, model.model.ranges)
    keys = torch.zeros(1, spec.key_heads, _KV_TOKENS, spec.head_dim, dtype=torch.bfloat16)
    values = torch.zeros(1, spec.kv_pairs, _KV_TOKENS, spec.value_dim, dtype=torch.bfloat16)
    cache_bytes = 0
    for layer in range(layers):
        # One layer's states at a time, so that a 16-bit cache of many layers is never held whole.
        cache.update(keys, values, layer)
        cache_bytes += cache.layers[layer].nbytes
        cache.layers[layer].reset()
    return cache_bytes / _KV_TOKENS
