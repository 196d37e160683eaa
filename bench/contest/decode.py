"""Peers that attend one new token over a long cache: in 16 bits, packed, and the matched Transformer's."""

from typing import Any

from torch import Tensor

from diffquant.attention import BACKENDS
from diffquant.bench.contest import counts, kernels
from diffquant.bench.contest.counts import Count
from diffquant.bench.contest.peers import BASELINE, PEERS, Peer
from diffquant.bench.contest.workloads import HeldCall, Workload, differential, held_by
from diffquant.family.call import AttentionCall
from diffquant.recipe import Recipe

RECIPES = {
    16: Recipe(),
    8: Recipe.of(kv="8:row"),
    6: Recipe.of(kv="6:row"),
    4: Recipe.of(k="4:c64", v="4:row"),
}


def unpacked(bits: int) -> Peer:
    """Peer that reads the torch cache: codes are expanded for every token, then FlashDiffAttn_2."""

    def make(work: Workload, device: str) -> AttentionCall:
        from diffquant.model.cache import PackedLayer

        call = differential(work, device)
        layer = PackedLayer(RECIPES[bits], {})
        layer.update(kernels.key_heads(call), call.v)
        return _cached(call, layer, layer.stored_keys.read(), layer.stored_values.read())

    def attention(call: AttentionCall) -> Tensor:
        layer = held_by(call)
        now = _cached(call, None, layer.stored_keys.read(), layer.stored_values.read())
        return BACKENDS["flashdiff2"].compute(now)

    return Peer(attention, make, lambda work: _count(work, bits), facts=_facts)


def fused(bits: int) -> Peer:
    """Peer that runs the decode kernel over its own store."""

    def make(work: Workload, device: str) -> AttentionCall:
        call = differential(work, device)
        if device == "cpu":
            return call
        store = kernels.stored(call, RECIPES[bits])
        return _cached(call, store, *store.read())

    def missing(call: AttentionCall) -> str | None:
        return None if call.v.is_cuda else "Triton kernels run on CUDA devices, not on cpu"

    def attention(call: AttentionCall) -> Tensor:
        return kernels.decode_attention(call, held_by(call))

    return Peer(attention, make, lambda work: _count(work, bits), missing=missing, facts=_facts)


def _cached(call: AttentionCall, cache: Any, keys: Tensor, values: Tensor) -> HeldCall:
    shared = call.k[0] is call.k[1]
    k = [keys] * 2 if shared else list(keys.chunk(2, 1))
    return HeldCall(call.q, k, values, call.lam, scale=call.scale, mask=call.mask, held=cache)


def _facts(call: AttentionCall) -> dict[str, float]:
    return {"cache bytes": float(call.held.nbytes)} if isinstance(call, HeldCall) else {}


def _count(work: Workload, bits: int) -> Count:
    """Count of attention over a cache of this many bits; a scale has 16."""
    if bits == 16:
        return counts.fused(work)
    per_token = {"key": 16 / (64 if bits == 4 else work.model.width), "value": 16 / work.model.value_width}
    return counts.fused(work, key_bytes=(bits + per_token["key"]) / 8, value_bytes=(bits + per_token["value"]) / 8)


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
    **{f"DIFF, {bits}-bit cache, unpacked": unpacked(bits) for bits in (8, 6, 4)},
    **{f"DIFF, fused, {bits}-bit cache": fused(bits) for bits in (16, 8, 6, 4)},
}
