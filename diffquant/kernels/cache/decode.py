"""Attention of a few new queries over a `KVStore`, both maps at once, V read once.

The keys are split into shares whose number depends on the capacity alone; each reads the length on the
device, so a captured CUDA graph stays valid while the store fills. A second kernel combines the shares,
subtracts the maps and, if asked, normalizes. Its plain form is `diffquant.attention.naive` over `store.read()`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import e, log2

import torch
import triton
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.family.call import check_tensors
from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm
from diffquant.kernels.arguments import HALF_TYPES, empty_output, widths_refusal
from diffquant.kernels.cache.decode_combine import decode_combine
from diffquant.kernels.cache.decode_share import decode_share
from diffquant.kernels.cache.kv_store import CAPACITY_STEP, KVStore, channels_in_word, store_refusal
from diffquant.kernels.configs import choose
from diffquant.kernels.gpu import device_class, device_refusal, processors, registers_of
from diffquant.kernels.linear.repack import FRAGMENT
from diffquant.recipe import Recipe


@dataclass(frozen=True)
class DecodeTile:
    """A block of `decode_share`.

    Attributes:
        tokens: number of tokens that a warp takes of a step, a multiple of 16.
        warps: number of warps.
        blocks: number of blocks that a multiprocessor holds; their registers are limited to what that takes.
    """

    tokens: int
    warps: int
    blocks: int

    def __post_init__(self) -> None:
        if self.tokens % FRAGMENT or CAPACITY_STEP % (self.tokens * self.warps):
            raise UsageError(
                f"decode: {self.warps} warps of {self.tokens} tokens; tokens must be a multiple of {FRAGMENT}, and a "
                f"step of all warps must divide {CAPACITY_STEP}, in which a store grows"
            )


# By the values' width and the most bits of K and V: as many tokens and blocks as registers hold the words, the sums and
# the queries of.
_SIZES = {
    **{(64, 4): (32, 4), (64, 6): (32, 4), (64, 8): (32, 4), (64, 16): (16, 4)},
    **{(128, 4): (32, 3), (128, 6): (32, 3), (128, 8): (16, 3), (128, 16): (16, 4)},
    **{(256, 4): (32, 2), (256, 6): (16, 2), (256, 8): (16, 2), (256, 16): (16, 3)},
}
TILES = {
    f"decode/{device}/{width}/{bits}": DecodeTile(tokens, 4, blocks)
    for device in ("sm_80", "sm_90")
    for (width, bits), (tokens, blocks) in _SIZES.items()
}
MAX_QUERIES = 16
# Rows of a tile: the columns of a product, whose rows are tokens or channels.
_ROWS = 8
_CAUSAL = Mask()
# Steps that a share's start and end cost: first loads, and partial sums written and read again.
_STEPS_TO_START = 2


def decode(
    q: Sequence[Tensor],
    store: KVStore,
    lam: Tensor | None,
    *,
    scale: float,
    mask: Mask = _CAUSAL,
    post: PairNorm | None = None,
) -> Tensor:
    """Causal attention of the newest tokens of a store.

    Args:
        q: one [B, h, T, d] a map, one or two maps, T up to 16; the last T tokens stored are theirs. The second may
            have fewer heads, a multiple of V's, that h / n neighbouring pairs share.
        store: one layer's keys and values; keys of both maps (V1) or of one that both read.
        lam: λ, broadcastable to [B, h, T, 1]; None with one map.
        scale: factor of Q·Kᵀ.
        mask: mask of the keys that a query sees; its padding, where there is any, is one range of keys a sequence.
        post: norm over a pair's output; None for none.

    Returns:
        [B, h, T, dv], in memory [B, T, h, dv].

    Raises:
        UsageError: arguments disagree, or the kernels do not take them.
    """
    shared = _shares_keys(q, store, lam, mask, post)
    if torch.is_grad_enabled() and any(x.requires_grad for x in q):
        raise UsageError("decode has no backward pass; call it under torch.no_grad()")
    keys, values = store.keys, store.values
    norm = post or PairNorm(0.0)
    starts, ends = mask.ranges or (None, None)
    # The operator's bookkeeping takes longer than a launch; only a trace needs it.
    run = _op if torch.compiler.is_compiling() else _launch
    out: Tensor = run(
        list(q), keys.tensors, values.tensors, store.progress, lam, starts, ends, norm.weight,
        keys.scheme.bits, keys.block, values.scheme.bits, max(keys.residual, values.residual), shared,
        scale, post is not None, norm.eps, norm.factor,
    )  # fmt: skip
    return out


def decode_refusal(recipe: Recipe, q: Sequence[Tensor], v: Tensor) -> str | None:
    """Reason why `decode` cannot serve these queries from a store of such values, or None."""
    if q[0].shape[2] > MAX_QUERIES:
        return f"decode takes up to {MAX_QUERIES} new tokens, not {q[0].shape[2]}"
    return (
        device_refusal(v.device)
        or widths_refusal(q[0], v)
        or store_refusal(recipe, q[0].shape[-1], v.shape[-1], v.dtype)
    )


def _shares_keys(q: Sequence[Tensor], store: KVStore, lam: Tensor | None, mask: Mask, post: PairNorm | None) -> bool:
    """Whether two maps share the store's keys.

    Raises:
        UsageError: arguments disagree, or the kernels do not take them.
    """
    k, v = store.keys, store.values
    batch, k_heads, blocks = k.codes.shape[:3]
    v_heads = v.codes.shape[1]
    shared = len(q) == 2 and k_heads == v_heads
    if not shared and k_heads != len(q) * v_heads:
        raise UsageError(f"decode: {len(q)} maps cannot read {k_heads} key heads beside {v_heads} value heads")
    if len(q) == 2 and q[1].shape[1] % v_heads:
        raise UsageError(
            f"decode: {q[1].shape[1]} noise heads are not a multiple of {v_heads} value heads; repeat them"
        )
    # Stand-ins of the shapes that are read back, without memory.
    keys = k.recent.new_empty(()).expand(batch, v_heads, blocks * FRAGMENT, k.width)
    values = v.recent.new_empty(()).expand(batch, v_heads, blocks * FRAGMENT, v.width)
    check_tensors(q, [keys] * len(q), values, lam, mask, post)
    if q[0].is_cuda and q[0].dtype not in HALF_TYPES:
        raise UsageError(f"decode takes float16 and bfloat16 on CUDA, got {q[0].dtype}")
    if mask.seen is not None:
        raise UsageError("decode: the kernels know only causal masks, but the call says which keys each query sees")
    if mask.window is not None:
        raise UsageError(f"decode: the kernels have no window, and queries see {mask.window} keys")
    if mask.keys is not None and mask.ranges is None:
        raise UsageError("decode: the padding mask has holes; the kernels take one range of keys a sequence")
    if not 0 < q[0].shape[2] <= MAX_QUERIES:
        raise UsageError(f"decode takes 1 to {MAX_QUERIES} new tokens, got {q[0].shape[2]}; longer ones are a prefill")
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
    scale: float,
    normed: bool,
    eps: float,
    factor: float,
) -> Tensor:
    """Output of `decode` for arguments taken apart; `keys` and `values` are `StoredSide.tensors`."""
    batch, pairs, queries, width = q[0].shape
    k_heads, v_heads = keys[0].shape[1], values[0].shape[1]
    value_width = _value_width(values, v_bits)
    out = empty_output(q[0], value_width)
    if out.numel() == 0:
        return out
    q = [x if x.stride(3) == 1 else x.contiguous() for x in q]
    tile = choose(TILES, f"decode/{device_class(out.device)}/{value_width}/{max(k_bits, v_bits)}")
    # One row of scales serves a warp's tokens.
    tokens = min(tile.tokens, k_block) if k_block > 1 else tile.tokens
    group, noise_group = pairs // v_heads, q[-1].shape[1] // v_heads
    tiles = triton.cdiv((group + (noise_group if len(q) == 2 else 0)) * queries, _ROWS)
    capacity = keys[0].shape[2] * FRAGMENT
    others = batch * v_heads * tiles
    shares = count_shares(others, capacity // (tokens * tile.warps), tile.blocks * processors(out.device))
    largest, total, acc = (
        out.new_empty(others, shares, _ROWS, *shape, dtype=torch.float32) for shape in ((), (), (value_width,))
    )
    with torch.cuda.device_of(out):
        decode_share[(batch * v_heads, shares, tiles)](
            q[0], q[1] if len(q) == 2 else None, q[0].stride()[:3], q[-1].stride()[:3], *keys, *values,
            progress, starts, ends, largest, total, acc, scale * log2(e), capacity, group, noise_group, queries,
            k_heads, v_heads, 1,
            RESIDUAL=residual, WIDTH=width, VALUE_WIDTH=value_width,
            K_BITS=k_bits, K_BLOCK=k_block, K_RING=keys[3].shape[2] * FRAGMENT,
            V_BITS=v_bits, V_RING=values[3].shape[2] * FRAGMENT,
            SHARED_K=shared_k, ROWS=_ROWS, TOKENS=tokens, WARPS=tile.warps, num_warps=tile.warps, num_stages=1,
            maxnreg=registers_of(tile.blocks, tile.warps), enable_fp_fusion=True,
        )  # fmt: skip
        lam = None if lam is None else lam.float().expand(batch, pairs, queries, 1)
        decode_combine[(batch * pairs * queries,)](
            largest, total, acc, lam, weight, out, lam.stride()[:3] if lam is not None else (0, 0, 0), out.stride()[:3],
            pairs, group, noise_group, queries, shares, tiles, eps, factor,
            NORM=normed, ROWS=_ROWS, SHARES=triton.next_power_of_2(shares), VALUE_WIDTH=value_width, num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip
    return out


_op = torch.library.custom_op("diffquant::decode", _launch, mutates_args=())


@_op.register_fake
def _(
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
    *_others: object,
) -> Tensor:
    return empty_output(q[0], _value_width(values, v_bits))


def _value_width(values: list[Tensor], bits: int) -> int:
    return values[0].shape[3] * FRAGMENT * channels_in_word(bits)


@cache
def count_shares(others: int, steps: int, room: int) -> int:
    """Number of shares that the keys are split into, for which a device with room for `room` programs ends first.

    Args:
        others: number of programs a share.
        steps: number of steps of all keys.
        room: number of programs that run at a time; they come in waves.
    """

    def steps_in_a_row(shares: int) -> int:
        return -(-others * shares // room) * (-(-steps // shares) + _STEPS_TO_START)

    return min(range(1, min(steps, room) + 1), key=steps_in_a_row)
