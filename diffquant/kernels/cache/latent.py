"""Decode attention of a few new queries over a `KVStore` of latents, which serve all heads as keys and as values.

The store's values are the latents, and its keys are the rotated key channels, which complete the latents to keys.
Queries and results are in the latent space. The maps are subtracted there, by the kernel that also combines `decode`'s
shares. The reference is `diffquant.attention.naive` over `store.read()`.
"""

from collections.abc import Sequence
from math import e, log2

import torch
import triton
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.family.call import check_tensors
from diffquant.family.mask import Mask
from diffquant.kernels.arguments import empty_output, list_decode_refusals
from diffquant.kernels.cache.decode_split import DecodeSplit
from diffquant.kernels.cache.kv_store import CAPACITY_STEP, LATENT_WIDTHS, KVStore
from diffquant.kernels.cache.latent_span import latent_key_split
from diffquant.kernels.configs import Config, choose_config
from diffquant.kernels.gpu import SMALLEST_SHARED_MEMORY, device_class, shared_memory
from diffquant.kernels.linear.repack import FRAGMENT

_CAUSAL = Mask()
_LEAST_ROWS = 16


def _latent_tile(tokens: int) -> Config:
    """Return a configuration of `latent_key_split` with at most 32 query rows.

    All warps process the same tokens, `tokens` · `warps` per step. The number of rows is a power of two from 16 on.
    """
    return {"tokens": tokens, "warps": 8, "blocks": 1, "rows": 32}


# By the latents' bits: the largest tiles whose loops do not spill without a residual and, on sm_80, fit in the shared
# memory of smaller devices.
TILES = {
    **{f"latent/sm_90/{bits}": _latent_tile(8) for bits in (16, 8, 4)},
    "latent/sm_90/6": _latent_tile(4),
    **{f"latent/sm_80/{bits}": _latent_tile(4) for bits in (16, 8, 6, 4)},
}


def decode_latent(
    q: Sequence[Tensor], store: KVStore, lam: Tensor | None, *, scale: float, mask: Mask = _CAUSAL
) -> Tensor:
    """Compute causal attention of the newest tokens of a store of latents.

    Args:
        q: queries of the last T stored tokens, T up to 16: [B, h, T, c + r] per map, one or two maps. The first c
            channels multiply latents, the last r rotated key channels. The second map may have n heads, each shared by
            h / n adjacent heads of the first.
        store: one layer's rotated key channels [B, 1, S, r] as keys and latents [B, 1, S, c] as values, with c = 512
            and r = 64.
        lam: λ, broadcastable to [B, h, T, 1], or None if there is one map.
        scale: factor of Q·Kᵀ.
        mask: which keys each query sees, with or without a window; with padding, the valid keys of each sequence must
            be contiguous.

    Returns:
        Weighted sums of latents [B, h, T, c], stored in the memory order [B, T, h, c].

    Raises:
        UsageError: arguments disagree, or the kernels do not support them.
    """
    _check(q, store, lam, mask)
    keys, values = store.keys, store.values
    batch, pairs, queries, _ = q[0].shape
    out = empty_output(q[0], values.width)
    if out.numel() == 0:
        return out
    q = [x if x.stride(3) == 1 else x.contiguous() for x in q]
    noises = q[1].shape[1] if len(q) == 2 else 0
    tile = choose_config(TILES, f"latent/{device_class(out.device)}/{values.scheme.bits}")
    _check_tile(tile)
    step, most_rows = tile["tokens"] * tile["warps"], tile["rows"]
    # Codes are multiplied in float16, unquantized tokens in their own dtype, which needs two copies of the queries.
    has_two_copies = values.ring_size and out.dtype == torch.bfloat16
    # With 6 bits Triton 3.6 needs 5 KiB more shared memory than smaller devices have.
    if (has_two_copies or values.scheme.bits == 6) and shared_memory(out.device) <= SMALLEST_SHARED_MEMORY:
        most_rows = max(_LEAST_ROWS, most_rows // 2)
    rows = min(most_rows, max(_LEAST_ROWS, triton.next_power_of_2((pairs + noises) * queries)))
    token_bits = keys.width * keys.scheme.bits + values.width * values.scheme.bits
    cut = DecodeSplit.of(tile, q, 1, token_bits, store.capacity, mask.window, rows=rows)
    sums = cut.allocate_partials(out)
    starts, ends = mask.valid_ranges or (None, None)
    with torch.cuda.device_of(out):
        latent_key_split[(batch * cut.tiles, cut.shares)](
            q[0], q[1] if noises else None, q[0].stride()[:3], q[-1].stride()[:3], *keys.tensors, *values.tensors,
            store.progress, starts, ends, *sums,
            scale * log2(e), mask.window, store.capacity, pairs, noises, queries, cut.tiles, 1,
            RESIDUAL=max(keys.residual, values.residual), ROTATED=keys.width, LATENT=values.width,
            K_BITS=keys.scheme.bits, K_BLOCK=keys.tokens_per_scale, K_RING=keys.ring_size,
            V_BITS=values.scheme.bits, V_RING=values.ring_size, ROWS=rows, TOKENS=step, **cut.options,
        )  # fmt: skip
        cut.combine(sums, lam, None, out)
    return out


def _check_tile(tile: Config) -> None:
    """Check tuned fields of a configuration.

    Raises:
        UsageError: a step does not fill the steps in which a store grows, or rows are no power of two.
    """
    step, rows = tile["tokens"] * tile["warps"], tile["rows"]
    if step % FRAGMENT or CAPACITY_STEP % step or rows < _LEAST_ROWS or rows & (rows - 1):
        raise UsageError(
            f"decode_latent: tuned to {tile['warps']} warps of {tile['tokens']} tokens by {rows} rows; a step of all "
            f"warps must be a multiple of {FRAGMENT} dividing {CAPACITY_STEP}, rows a power of 2 from {_LEAST_ROWS} on"
        )


def _check(q: Sequence[Tensor], store: KVStore, lam: Tensor | None, mask: Mask) -> None:
    """Check the arguments of `decode_latent`.

    Raises:
        UsageError: arguments disagree, or the kernels do not support them; the message lists all problems.
    """
    k, v = store.keys, store.values
    batch, heads = v.codes.shape[:2]
    wrong = []
    if (k.width, v.width) not in LATENT_WIDTHS or (heads, k.codes.shape[1]) != (1, 1):
        wrong.append(
            f"the store has {k.codes.shape[1]} heads of {k.width} channels and {heads} of {v.width}; the kernel reads "
            "one head of 64 rotated channels and one of 512 latent channels"
        )
    if q[0].dtype != v.dtype:
        wrong.append(f"queries are {q[0].dtype} and the stored latents {v.dtype}; use one dtype")
    wrong += list_decode_refusals(q, 1, mask)
    if wrong:
        raise UsageError("decode_latent: " + "; ".join(wrong))
    # Tensors with the shapes of the stored keys and values, without memory, for the checks.
    empty = v.recent.new_empty(())
    keys, values = (empty.expand(batch, 1, store.capacity, width) for width in (v.width + k.width, v.width))
    check_tensors(q, [keys] * len(q), values, lam, mask, None)
