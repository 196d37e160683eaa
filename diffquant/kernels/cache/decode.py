"""Decode attention of a few new queries over a `KVStore`: both maps at once, reading V once.

The keys are divided into splits (split-K), called shares here. Their number depends only on the capacity, and the
length is read on the device, so a captured CUDA graph stays valid while the store fills. A second kernel combines the
shares, subtracts the maps and applies the pair norm. The reference is `diffquant.attention.naive` over `store.read()`.
"""

from collections.abc import Sequence
from math import e, log2
from typing import Any

import torch
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.family.call import check_tensors
from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm
from diffquant.kernels.arguments import empty_output, list_decode_refusals
from diffquant.kernels.cache.decode_share import decode_key_split
from diffquant.kernels.cache.decode_split import ROWS, TILES, DecodeSplit, choose_decode_config
from diffquant.kernels.cache.kv_store import CAPACITY_STEP, WIDTHS, KVStore
from diffquant.kernels.cache.stored_side import channels_in_word
from diffquant.kernels.gpu import device_class
from diffquant.kernels.linear.repack import FRAGMENT

_CAUSAL = Mask()


def decode(
    q: Sequence[Tensor],
    store: KVStore,
    lam: Tensor | None,
    *,
    scale: float,
    mask: Mask = _CAUSAL,
    post: PairNorm | None = None,
) -> Tensor:
    """Compute causal attention of the newest tokens of a store.

    Args:
        q: queries of the last T stored tokens, T up to 16: [B, h, T, d] per map, one or two maps. The second may have n
            heads, each shared by h / n adjacent pairs; n is a multiple of V's number of heads.
        store: one layer's keys and values; keys of both maps (V1) or keys that both maps share.
        lam: λ, broadcastable to [B, h, T, 1], or None if there is one map.
        scale: factor of Q·Kᵀ.
        mask: which keys each query sees, with or without a window; with padding, the valid keys of each sequence must
            be contiguous.
        post: pair norm, or None.

    Returns:
        [B, h, T, dv], in memory [B, T, h, dv].

    Raises:
        UsageError: arguments disagree, or the kernels do not support them.
    """
    shared = _shares_keys(q, store, lam, mask, post)
    keys, values = store.keys, store.values
    norm = post or PairNorm(0.0)
    starts, ends = mask.valid_ranges or (None, None)
    # The torch operator is called only while tracing, since its overhead is longer than a launch.
    run = _op if torch.compiler.is_compiling() else _launch
    out: Tensor = run(
        list(q), keys.tensors, values.tensors, store.progress, lam, starts, ends, norm.weight,
        keys.scheme.bits, keys.tokens_per_scale, values.scheme.bits, max(keys.residual, values.residual), shared,
        mask.window, scale, post is not None, norm.eps, norm.factor,
    )  # fmt: skip
    return out


def _shares_keys(q: Sequence[Tensor], store: KVStore, lam: Tensor | None, mask: Mask, post: PairNorm | None) -> bool:
    """Return whether two maps share the store's keys, after checking all arguments.

    Raises:
        UsageError: arguments disagree, or the kernels do not support them.
    """
    k, v = store.keys, store.values
    batch, k_heads, blocks = k.codes.shape[:3]
    v_heads = v.codes.shape[1]
    if (k.width, v.width) not in WIDTHS:
        raise UsageError(f"decode: the store has {k.width} channels and latents of {v.width}; use decode_latent")
    shared = len(q) == 2 and k_heads == v_heads
    if not shared and k_heads != len(q) * v_heads:
        raise UsageError(f"decode: {k_heads} key heads do not fit {len(q)} maps and {v_heads} value heads")
    if wrong := list_decode_refusals(q, v_heads, mask):
        raise UsageError("decode: " + "; ".join(wrong))
    # Tensors with the shapes of the stored keys and values, without memory, for the checks.
    keys = k.recent.new_empty(()).expand(batch, v_heads, blocks * FRAGMENT, k.width)
    values = v.recent.new_empty(()).expand(batch, v_heads, blocks * FRAGMENT, v.width)
    check_tensors(q, [keys] * len(q), values, lam, mask, post)
    return shared


def _launch(
    q: list[Tensor],
    keys: list[Tensor],
    values: list[Tensor],
    progress: Tensor,
    lam: Tensor | None,
    starts: Tensor | None,
    ends: Tensor | None,
    weight: Tensor | None,
    k_bits: int,
    k_block: int,
    v_bits: int,
    residual: int,
    shared_k: bool,
    window: int | None,
    scale: float,
    normed: bool,
    eps: float,
    factor: float,
) -> Tensor:
    """Compute the output of `decode`; `keys` and `values` are `StoredKeysOrValues.tensors`."""
    queries, width = q[0].shape[2:]
    k_heads, v_heads = keys[0].shape[1], values[0].shape[1]
    value_width = _value_width(values, v_bits)
    out = empty_output(q[0], value_width)
    if out.numel() == 0:
        return out
    q = [x if x.stride(3) == 1 else x.contiguous() for x in q]
    # With scales per block, a warp's tokens must lie in one block.
    capacity, most_tokens = keys[0].shape[2] * FRAGMENT, k_block if k_block > 1 else CAPACITY_STEP
    token_bits = k_heads // v_heads * width * k_bits + value_width * v_bits
    tile = choose_decode_config(TILES, f"decode/{device_class(out.device)}/{value_width}/{max(k_bits, v_bits)}")
    cut = DecodeSplit.of(tile, q, v_heads, token_bits, capacity, window, most_tokens)
    sums = cut.allocate_partials(out)
    with torch.cuda.device_of(out):
        decode_key_split[cut.grid](
            q[0], q[1] if len(q) == 2 else None, q[0].stride()[:3], q[-1].stride()[:3], *keys, *values,
            progress, starts, ends, *sums,
            scale * log2(e), window, capacity, cut.group, cut.noise_group, queries, k_heads, v_heads, 1,
            RESIDUAL=residual, WIDTH=width, VALUE_WIDTH=value_width,
            K_BITS=k_bits, K_BLOCK=k_block, K_RING=keys[3].shape[2] * FRAGMENT,
            V_BITS=v_bits, V_RING=values[3].shape[2] * FRAGMENT,
            SHARED_K=shared_k, ROWS=ROWS, TOKENS=cut.tokens, WARPS=tile["warps"], **cut.options,
        )  # fmt: skip
        cut.combine(sums, lam, PairNorm(eps, weight, factor) if normed else None, out)
    return out


_op = torch.library.custom_op("diffquant::decode", _launch, mutates_args=())


@_op.register_fake
def _(q: list[Tensor], keys: list[Tensor], values: list[Tensor], *rest: Any) -> Tensor:
    # After these come five tensors, then the bits and block of keys and the bits of values.
    return empty_output(q[0], _value_width(values, rest[7]))


def _value_width(values: list[Tensor], bits: int) -> int:
    return values[0].shape[3] * FRAGMENT * channels_in_word(bits)
