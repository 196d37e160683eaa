"""Peers for decoding, one new token over a long cache: 16-bit and quantized caches, and the matched Transformer."""

from typing import Any

import torch
from torch import Tensor

from diffquant.attention import BACKENDS
from diffquant.benchmarks.peers import BASELINE, PEERS, Peer
from diffquant.benchmarks.workloads import CallWithState, Workload, get_prepared_object, make_differential_call
from diffquant.family.call import AttentionCall
from diffquant.recipe import Recipe

RECIPES = {
    16: Recipe(),
    8: Recipe.of(kv="8:row"),
    6: Recipe.of(kv="6:row"),
    4: Recipe.of(k="4:c64", v="4:row"),
}


def make_unpacked_peer(bits: int) -> Peer:
    """Make a peer that dequantizes a whole cache of `bits` bits with torch, and then runs FlashDiffAttn_2."""

    def make(work: Workload, device: str) -> AttentionCall:
        from diffquant.model.cache import PackedLayer

        call = make_differential_call(work, device)
        layer = PackedLayer(RECIPES[bits], {})
        layer.update(join_key_heads(call), call.v)
        return _held_call(call, layer, layer.stored_keys.read(), layer.stored_values.read())

    def attention(call: AttentionCall) -> Tensor:
        layer = get_prepared_object(call)
        now = _held_call(call, None, layer.stored_keys.read(), layer.stored_values.read())
        return BACKENDS["flashdiff2"].compute(now)

    return Peer(attention, make, facts=_facts)


def make_fused_peer(bits: int) -> Peer:
    """Make a peer that runs the fused decode kernel on a cache of `bits` bits."""

    def make(work: Workload, device: str) -> AttentionCall:
        call = make_differential_call(work, device)
        if device == "cpu":
            return call
        store = fill_store(call, RECIPES[bits])
        return _held_call(call, store, *store.read())

    def missing(call: AttentionCall) -> str | None:
        return None if call.v.is_cuda else "Triton kernels run on CUDA devices, not on cpu"

    def attention(call: AttentionCall) -> Tensor:
        return decode_attention(call, get_prepared_object(call))

    return Peer(attention, make, missing=missing, facts=_facts)


def _held_call(call: AttentionCall, cache: Any, keys: Tensor, values: Tensor) -> CallWithState:
    k = [keys] * 2 if call.shares_keys else list(keys.chunk(2, 1))
    return CallWithState(call.q, k, values, call.lam, scale=call.scale, mask=call.mask, state=cache)


def _facts(call: AttentionCall) -> dict[str, float]:
    return {"cache bytes": float(call.state.nbytes)} if isinstance(call, CallWithState) else {}


def join_key_heads(call: AttentionCall) -> Tensor:
    """Return a call's keys in one tensor, as a cache stores them, [batch, key heads, tokens, width].

    In V1 the keys of all first maps come before those of all second maps; in V2 both maps share their keys.
    """
    return call.k[0] if call.shares_keys else torch.cat(tuple(call.k), 1)


def fill_store(call: AttentionCall, recipe: Recipe) -> Any:
    """Return a `KVStore`, the decode kernel's cache, filled with a call's keys and values."""
    from diffquant.kernels.cache.append import append
    from diffquant.kernels.cache.kv_store import KVStore

    keys = join_key_heads(call)
    store = KVStore(recipe, keys, call.v, call.v.shape[2])
    append(store, keys, call.v)
    return store


def decode_attention(call: AttentionCall, store: Any) -> Tensor:
    """Run the decode kernel on a call's queries and a cache; return the output [batch, pairs, tokens, value width].

    Args:
        store: the cache, from `fill_store`.
    """
    from diffquant.kernels.cache.decode import decode as run

    return run(call.q, store, call.lam, scale=call.scale)


DECODE_PEERS: dict[str, Peer] = {
    name: PEERS[name]
    for name in (
        BASELINE,
        "Transformer, SDPA cuDNN",
        "Transformer, flash-attn",
        "DIFF, eager",
        "FlashDiffAttn_1",
        "FlashDiffAttn_1, SDPA flash, keys padded",
        "FlashDiffAttn_2",
        "FlashDiffAttn_2, SDPA flash",
        "FlashDiffAttn_2, flash-attn",
    )
} | {
    **{f"DIFF, {bits}-bit cache, unpacked": make_unpacked_peer(bits) for bits in (8, 6, 4)},
    **{f"DIFF, fused, {bits}-bit cache": make_fused_peer(bits) for bits in (16, 8, 6, 4)},
}
