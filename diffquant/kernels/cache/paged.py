"""Decode attention of a few new queries over 16-bit keys and values in pages of 16 tokens: vLLM's cache in place.

Page tables and lengths are read on the device, so a captured CUDA graph stays valid while sequences grow, end and
begin. The reference is `diffquant.attention.naive` over each sequence's gathered pages.
"""

from collections.abc import Sequence
from math import e, log2

import torch
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.family.call import check_tensors
from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm
from diffquant.kernels.arguments import HALF_TYPES, empty_output, list_decode_refusals
from diffquant.kernels.cache.decode_share import paged_key_split
from diffquant.kernels.cache.decode_split import ROWS, DecodeSplit, choose_decode_config, make_decode_config
from diffquant.kernels.gpu import device_class
from diffquant.kernels.linear.repack import FRAGMENT

PAGE = FRAGMENT
# By the values' width. At 256 there are no registers left for the addresses of rows.
TILES = {
    f"paged/{device}/{width}": make_decode_config(16, 4, blocks)
    for device in ("sm_80", "sm_90")
    for width, blocks in ((64, 4), (128, 4), (256, 2))
}


def decode_paged(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Tensor,
    table: Tensor,
    lengths: Tensor,
    lam: Tensor | None,
    *,
    scale: float,
    window: int | None = None,
    post: PairNorm | None = None,
) -> Tensor:
    """Compute causal attention of the newest tokens of sequences whose keys and values lie in pages of 16 tokens.

    Nothing is copied: `k` and `v` may be views of a vLLM cache, whose N blocks are the pages. If a cache stores both
    maps' keys in one head, pass `cache[..., :d]` and `cache[..., d:]`.

    Args:
        q: queries of each sequence's last T tokens, T up to 16: [B, h, T, d] per map, one or two maps. The second may
            have n heads, each shared by h / n adjacent pairs; n is a multiple of V's number of heads.
        k: keys, [N, 16, h_kv, d] per map with equal strides; the same tensor twice if the maps share keys (V2).
            float16 or bfloat16, d = 64 or 128.
        v: values [N, 16, h_kv, dv], dv = d or 2d.
        table: page numbers of each sequence in order, int32 [B, M], M at least 1. Only entries of pages with a token
            that some query sees need to be valid; in an unused row, the first entry must be valid.
        lengths: number of tokens of each sequence including the new ones, int32 [B], up to 16 M. 0 marks an unused row,
            whose output is 0.
        lam: λ, broadcastable to [B, h, T, 1], or None if there is one map.
        scale: factor of Q·Kᵀ.
        window: number of newest keys that a query sees, including its own, or None if it sees all.
        post: pair norm, or None.

    Returns:
        [B, h, T, dv], in memory [B, T, h, dv].

    Raises:
        UsageError: arguments disagree, or the kernels do not support them.
    """
    _check(q, k, v, table, lengths, lam, window, post)
    queries, width = q[0].shape[2:]
    v_heads, value_width = v.shape[2:]
    out = empty_output(q[0], value_width)
    if out.numel() == 0:
        return out
    q = [x if x.stride(3) == 1 else x.contiguous() for x in q]
    capacity = table.shape[1] * PAGE
    shared = len(q) == 2 and _is_same(*k)
    token_bits = 16 * ((1 if shared else len(k)) * width + value_width)
    tile = choose_decode_config(TILES, f"paged/{device_class(out.device)}/{value_width}")
    cut = DecodeSplit.of(tile, q, v_heads, token_bits, capacity, window)
    sums = cut.allocate_partials(out)
    with torch.cuda.device_of(out):
        paged_key_split[cut.grid](
            q[0], q[1] if len(q) == 2 else None, q[0].stride()[:3], q[-1].stride()[:3],
            k[0], k[-1], v, k[0].stride()[:3], v.stride()[:3], table, table.stride(0), lengths, *sums,
            scale * log2(e), window, capacity, cut.group, cut.noise_group, queries, v_heads, 1,
            WIDTH=width, VALUE_WIDTH=value_width, SHARED_K=shared,
            ROWS=ROWS, TOKENS=cut.tokens, WARPS=tile["warps"], **cut.options,
        )  # fmt: skip
        cut.combine(sums, lam, post, out)
    return out


def _check(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Tensor,
    table: Tensor,
    lengths: Tensor,
    lam: Tensor | None,
    window: int | None,
    post: PairNorm | None,
) -> None:
    """Check the arguments of `decode_paged`.

    Raises:
        UsageError: arguments disagree, or the kernels do not support them; the message lists all problems.
    """
    wrong = []
    for name, x in (*((f"k{i + 1}" if len(k) > 1 else "k", x) for i, x in enumerate(k)), ("v", v)):
        if x.ndim != 4 or x.shape[1] != PAGE or x.stride(3) != 1:
            wrong.append(
                f"{name} {list(x.shape)} with strides {list(x.stride())} is not [pages, {PAGE}, heads, width] with "
                "a head's channels contiguous"
            )
    if table.ndim != 2 or not table.shape[-1] or table.dtype != torch.int32 or table.stride(-1) != 1:
        wrong.append(
            f"the table is {table.dtype} {list(table.shape)}, not int32 [sequences, pages] with contiguous rows"
        )
    if lengths.ndim != 1 or lengths.dtype != torch.int32 or lengths.stride(0) != 1:
        wrong.append(f"lengths are {lengths.dtype} {list(lengths.shape)}, not int32 [sequences]")
    if not wrong and {table.shape[0], lengths.shape[0]} != {q[0].shape[0]}:
        counts = f"the table of {table.shape[0]}, lengths of {lengths.shape[0]}"
        wrong.append(f"queries are of {q[0].shape[0]} sequences, {counts}")
    if table.device != v.device or lengths.device != v.device:
        wrong.append(f"the table is on {table.device}, lengths on {lengths.device}, values on {v.device}")
    if window is not None and window < 1:
        wrong.append(f"the window is {window} keys; it must be 1 or more")
    if len({x.stride() for x in k}) > 1:
        wrong.append(f"strides of the two maps' keys differ: {' and '.join(str(list(x.stride())) for x in k)}")
    if not wrong and {x.shape[:3] for x in k} != {v.shape[:3]}:
        shapes = ", ".join(str(list(x.shape)) for x in (*k, v))
        wrong.append(f"keys and values have different pages or heads: {shapes}")
    if wrong:
        raise UsageError("decode_paged: " + "; ".join(wrong))
    # Tensors with the shapes of gathered keys and values, without memory, for the checks.
    shape = q[0].shape[0], v.shape[2], table.shape[1] * PAGE
    keys = [x.new_empty(()).expand(*shape, x.shape[3]) for x in k]
    check_tensors(q, keys, v.new_empty(()).expand(*shape, v.shape[3]), lam, Mask(), post)
    width, value_width = q[0].shape[3], v.shape[3]
    if width not in (64, 128) or value_width not in (width, 2 * width):
        wrong.append(f"queries are {width} wide, not 64 or 128, or values are {value_width}, not as wide or twice")
    if v.dtype not in (*HALF_TYPES, torch.float32):
        wrong.append(f"keys and values are {v.dtype}; the kernels support float16 and bfloat16")
    wrong += list_decode_refusals(q, v.shape[2], Mask())
    if wrong:
        raise UsageError("decoding from pages: " + "; ".join(wrong))


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr()
