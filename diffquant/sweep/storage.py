"""Sizes of a recipe: bytes of the weights, and bytes of KV cache per token."""

import torch

from diffquant.model.cache import PackedStates
from diffquant.model.causal import CausalModel
from diffquant.model.windowed_cache import storage_of
from diffquant.quantization.plan import plan_quantization
from diffquant.recipe import Recipe
from diffquant.report.sizes import bytes_at_16_bits
from diffquant.scheme import Scheme
from diffquant.source.source import Source

_KV_TOKENS = 1024


def weight_bytes(source: Source, recipe: Recipe) -> int:
    """Bytes of the checkpoint that `quantize` writes under a recipe, scales included.

    Weights that the recipe does not quantize count 16 bits each, whatever dtype the source has.
    """
    if source.packed:
        return source.checkpoint.nbytes
    plan = plan_quantization(source, recipe)
    return plan.bytes_after if plan.schemes else bytes_at_16_bits(plan.weights)


def state_bytes_per_token(scheme: Scheme, heads: int, width: int) -> float:
    """Bytes per token of one layer's keys or values under a scheme, averaged over 1,024 tokens of 16-bit states."""
    states = PackedStates(scheme, 0)
    states.append(torch.zeros(1, heads, _KV_TOKENS, width, dtype=torch.bfloat16))
    return states.nbytes / _KV_TOKENS


def kv_bytes_per_token(model: CausalModel, tokens: int = _KV_TOKENS) -> float:
    """Bytes of keys and values per token of one sequence in the recipe's cache, averaged over `tokens` tokens.

    Layers with a window hold only the window. States of recurrent layers do not count, since they do not grow with
    tokens.
    """
    cache_bytes = 0
    for layer, rows in model.model.architecture.token_rows.items():
        # One layer's states at a time, so that a 16-bit cache of many layers is never held whole.
        storage = storage_of(rows, layer, model.recipe, model.model.ranges)
        storage.update(*(torch.zeros(1, n, tokens, d, dtype=torch.bfloat16) for n, d in (rows.keys, rows.values)))
        cache_bytes += storage.nbytes
    return cache_bytes / tokens
