"""Attention of a few new queries over a `KVStore`, both maps at once, V read once.

The keys are split into shares whose number depends on the capacity alone; each reads the length on the
device, so a captured CUDA graph stays valid while the store fills. A second kernel combines the shares,
subtracts the maps and, if asked, normalizes. Its plain form is `diffquant.attention.naive` over `store.read()`.
"""

from collections.abc import Sequence
from math import e, log2

import torch
import triton
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.family.call import check_tensors
from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm
from diffquant.kernels import gpu
from diffquant.kernels.arguments import HALF_TYPES, empty_output, widths_refusal
from diffquant.kernels.cache.decode_combine import decode_combine
from diffquant.kernels.cache.decode_share import decode_share
from diffquant.kernels.cache.kv_store import KVStore, store_refusal
from diffquant.kernels.configs import AttentionTile, choose
from diffquant.kernels.gpu import device_class, device_refusal
from diffquant.kernels.strides import same_strides
from diffquant.recipe import Recipe

# By the values' width, which is what fills the registers. Few warps: all of them hold the same queries.
TILES = {
    "decode/sm_90/64": AttentionTile(16, 64, 2, 3),
    "decode/sm_90/128": AttentionTile(16, 64, 2, 3),
    "decode/sm_90/256": AttentionTile(16, 64, 4, 3),
    "decode/sm_80/64": AttentionTile(16, 64, 2, 3),
    "decode/sm_80/128": AttentionTile(16, 64, 2, 3),
    "decode/sm_80/256": AttentionTile(16, 64, 4, 3),
}
MAX_QUERIES = 16
_CAUSAL = Mask()
_PROGRAMS_A_PROCESSOR = 4
# Bytes of shared memory that a block takes beside the steps loaded ahead: 11,008 at most in the compiled kernels.
_SCRATCH = 16_384


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
        q: one [B, h, T, d] a map, one or two maps, T up to 16; the last T tokens stored are theirs.
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
    out: Tensor = _op(
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
    batch, k_heads, capacity = k.codes.shape[:3]
    v_heads = v.codes.shape[1]
    shared = len(q) == 2 and k_heads == v_heads
    if not shared and k_heads != len(q) * v_heads:
        raise UsageError(f"decode: {len(q)} maps cannot read {k_heads} key heads beside {v_heads} value heads")
    # Stand-ins of the shapes that are read back, without memory.
    keys = k.recent.new_empty(()).expand(batch, v_heads, capacity, k.width)
    values = v.recent.new_empty(()).expand(batch, v_heads, capacity, v.width)
    check_tensors(q, [keys] * len(q), values, lam, mask, post)
    if q[0].is_cuda and q[0].dtype not in HALF_TYPES:
        raise UsageError(f"decode takes float16 and bfloat16 on CUDA, got {q[0].dtype}")
    if mask.window is not None:
        raise UsageError(f"decode: the kernels have no window, and queries see {mask.window} keys")
    if mask.keys is not None and mask.ranges is None:
        raise UsageError("decode: the padding mask has holes; the kernels take one range of keys a sequence")
    if not 0 < q[0].shape[2] <= MAX_QUERIES:
        raise UsageError(f"decode takes 1 to {MAX_QUERIES} new tokens, got {q[0].shape[2]}; longer ones are a prefill")
    return shared


@torch.library.custom_op("diffquant::decode", mutates_args=())
def _op(
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
    q = same_strides(*q)
    tile = choose(TILES, f"decode/{device_class(out.device)}/{value_width}")
    # One row of scales serves a step.
    step = min(tile.keys, k_block) if k_block > 1 else tile.keys
    group = pairs // v_heads
    tiles = triton.cdiv(len(q) * group * queries, tile.queries)
    shares = _count_shares(batch * v_heads * tiles, keys[0].shape[2] // step, out.device)
    partial = (batch * v_heads * tiles, shares, tile.queries)
    largest, total, acc = (
        out.new_empty(shape, dtype=torch.float32) for shape in (partial, partial, (*partial, value_width))
    )
    stages = _count_stages(tile, step * _bytes_of_a_token(keys, values), out.device)
    ptx = not triton.knobs.runtime.interpret and out.dtype != torch.float32
    with torch.cuda.device_of(out):
        # No model of the family has a window: the kernel's branch for it is compiled away.
        decode_share[(batch * v_heads, shares, tiles)](
            q[0], q[1] if len(q) == 2 else None, q[0].stride()[:3], *keys, *values, progress, starts, ends,
            largest, total, acc, scale * log2(e), keys[0].shape[2], group, queries, 0, k_heads, v_heads,
            RESIDUAL=residual, WINDOW=False, WIDTH=width, VALUE_WIDTH=value_width,
            K_BITS=k_bits, K_BLOCK=k_block, K_RING=keys[3].shape[2], V_BITS=v_bits, V_RING=values[3].shape[2],
            SHARED_K=shared_k, ROWS=tile.queries, STEP=step, STAGES=stages, PTX=ptx, num_warps=tile.warps,
            enable_fp_fusion=True,
        )  # fmt: skip
        lam = None if lam is None else lam.float().expand(batch, pairs, queries, 1)
        decode_combine[(batch * pairs * queries,)](
            largest, total, acc, lam, weight, out, lam.stride()[:3] if lam is not None else (0, 0, 0), out.stride()[:3],
            pairs, group, queries, shares, tiles, eps, factor,
            NORM=normed, ROWS=tile.queries, SHARES=triton.next_power_of_2(shares), VALUE_WIDTH=value_width, num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip
    return out


@_op.register_fake
def _(q: list[Tensor], keys: list[Tensor], values: list[Tensor], *others: object) -> Tensor:
    v_bits = others[7]
    return empty_output(q[0], _value_width(values, v_bits))


def _value_width(values: list[Tensor], bits: object) -> int:
    return values[0].shape[-1] * (2 if bits in (4, 6) else 1)


def _bytes_of_a_token(keys: list[Tensor], values: list[Tensor]) -> int:
    """Bytes that a program reads of a token, scales aside: K of each map that reads the same V, and that V."""
    k, v = (sum(plane.shape[-1] * plane.element_size() for plane in side[:2]) for side in (keys, values))
    return k * (keys[0].shape[1] // values[0].shape[1]) + v


def _count_stages(tile: AttentionTile, step_bytes: int, device: torch.device) -> int:
    """Number of steps loaded ahead: the tile's, or as many as a block's shared memory holds."""
    room = gpu.shared_memory(device) - _SCRATCH
    return max(1, min(tile.stages, 1 + room // step_bytes))


def _count_shares(others: int, steps: int, device: torch.device) -> int:
    """Number of shares that the keys are split into, so that with `others` programs a share the device is full."""
    return max(min(-(-_PROGRAMS_A_PROCESSOR * gpu.processors(device) // others), steps), 1)
