"""What a recipe stores: bytes of the checkpoint that `quantize` would write, bytes of KV cache a token."""

from pathlib import Path

import torch

from diffquant.checkpoint.check import check_tensors
from diffquant.checkpoint.plan import make_plan
from diffquant.checkpoint.reader import open_checkpoint
from diffquant.model.adapters import adapter_for
from diffquant.model.modeling import DiffTransformer
from diffquant.scheme import Recipe

_KV_TOKENS = 1024


def weight_bytes(path: Path, recipe: Recipe) -> int:
    """Bytes of all tensors with the recipe's weights packed, scales included."""
    checkpoint = open_checkpoint(path)
    adapter = adapter_for(checkpoint.config)
    if check_tensors(checkpoint, adapter):
        return checkpoint.nbytes
    return make_plan(checkpoint, adapter, recipe).bytes_after


def kv_bytes_per_token(model: DiffTransformer) -> float:
    """Bytes that the recipe's cache holds for a token of one sequence, over 1,024 tokens of 16-bit states."""
    spec, cache = model.config.diff_spec, model.new_cache()
    keys = torch.zeros(1, spec.key_heads, _KV_TOKENS, spec.head_dim, dtype=torch.bfloat16)
    values = torch.zeros(1, spec.kv_pairs, _KV_TOKENS, spec.value_dim, dtype=torch.bfloat16)
    held = 0
    for number in range(model.config.num_hidden_layers):
        cache.update(keys, values, number)
        layer = cache.layers[number]
        held += layer.nbytes if hasattr(layer, "nbytes") else layer.keys.nbytes + layer.values.nbytes
    return held / _KV_TOKENS
