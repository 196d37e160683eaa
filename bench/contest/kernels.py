"""Calls of the kernels that only a GPU runs, each imported when it is first called."""

from typing import Any

import torch
from torch import Tensor

from diffquant.family.call import AttentionCall
from diffquant.numbers.formats import format_named
from diffquant.recipe import Recipe


def key_heads(call: AttentionCall) -> Tensor:
    """Keys [B, H, S, d] as a cache holds them: V1's first maps before all second ones, V2's once."""
    return call.k[0] if call.k[0] is call.k[-1] else torch.cat(tuple(call.k), 1)


def stored(call: AttentionCall, recipe: Recipe) -> Any:
    """A kernel's KV store filled with a call's keys and values."""
    from diffquant.kernels.cache.append import append
    from diffquant.kernels.cache.kv_store import KVStore

    keys = key_heads(call)
    store = KVStore(recipe, keys, call.v, call.v.shape[2])
    append(store, keys, call.v)
    return store


def decode_attention(call: AttentionCall, store: Any) -> Tensor:
    """Attention [B, h, T, dv] of a call's queries over a store."""
    from diffquant.kernels.cache.decode import decode as run

    return run(call.q, store, call.lam, scale=call.scale)


def eight_bit_codes(call: AttentionCall) -> Any:
    """8-bit Q, K and V of a call, as `triton-fp8` makes them before it attends."""
    from diffquant.kernels.attention.prefill_int8 import TILES
    from diffquant.kernels.attention.quantize_qkv import quantize_qkv
    from diffquant.kernels.configs import choose
    from diffquant.kernels.gpu import device_class
    from diffquant.kernels.strides import same_strides

    tile = choose(TILES, f"prefill_int8/{device_class(call.v.device)}/{call.q[0].shape[-1]}")
    q, k, (v,) = same_strides(*call.q), same_strides(*call.k), same_strides(call.v)
    return quantize_qkv(q, k, v, None, None, call.scale, tile_rows=tile.queries, block=tile.keys, values=True)


def packed_weight(weight: Tensor, bits: int, group: int) -> tuple[Any, Tensor]:
    """A weight [N, K] as the linear kernels read it, and as the values [N, K] in float32 that its codes stand for."""
    from diffquant.kernels.linear.repack import repack

    groups = weight.float().unflatten(-1, (-1, group))
    integers = format_named(str(bits))
    scale = integers.scale(groups, -1, torch.float32)
    codes = integers.codes(groups, scale)
    words = integers.pack(codes.flatten(-2))
    packed = repack(words, scale.squeeze(-1), bits, weight.shape[1], weight.dtype)
    return packed, integers.decode(codes, scale).flatten(-2)


def packed_product(x: Tensor, weight: Any) -> Tensor:
    """Product [M, N] of x [M, K] and a packed weight, transposed."""
    from diffquant.kernels.linear.linear import linear

    return linear(x, weight)
