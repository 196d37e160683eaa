"""Packed keys and values in pages of 16 tokens: storage, appending, and attention of a few new queries over it.

A page is what a `KVStore` keeps of 16 tokens: fragments of each head, and a scale a token. Tables and lengths are those
of a server's scheduler and stand on the device. The plain form is `diffquant.attention.naive` over what
`PagedStore.read` gives.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import e, log2

import torch
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.family.norm import PairNorm
from diffquant.kernels.arguments import empty_output
from diffquant.kernels.cache.append import largest_scale
from diffquant.kernels.cache.append_pages import append_pages
from diffquant.kernels.cache.decode_cut import ROWS, TILES, Cut
from diffquant.kernels.cache.kv_store import StoredSide, store_refusal
from diffquant.kernels.cache.paged import PAGE, check_call, check_sequences
from diffquant.kernels.cache.paged_share import packed_pages_share
from diffquant.kernels.configs import choose
from diffquant.kernels.gpu import device_class
from diffquant.recipe import Recipe


class PagedStore:
    """Packed keys and values of one layer, in pages that tables give to sequences.

    Attributes:
        keys, values: storage of each, whose sequences are the pages, of 16 tokens each.
    """

    def __init__(self, recipe: Recipe, k: Tensor, v: Tensor, pages: int) -> None:
        """Empty pages for states as k [B, H, T, d] and v [B, h_kv, T, dv]; B and T do not matter.

        Raises:
            UsageError: pages cannot hold such keys and values.
        """
        if reason := paged_store_refusal(recipe, k.shape[3], v.shape[3], k.dtype):
            raise UsageError(f"paged store: {reason}")

        like = [x.new_empty(()).expand(pages, x.shape[1], 1, x.shape[3]) for x in (k, v)]
        self.keys = StoredSide.empty(recipe.k, 0, False, like[0], PAGE)
        self.values = StoredSide.empty(recipe.v, 0, True, like[1], PAGE)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(x.untyped_storage().nbytes() for side in (self.keys, self.values) for x in side.tensors)

    def append(self, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> None:
        """Store the newest tokens of each sequence.

        Args:
            k: keys [B, H, T, d] in the states' dtype, all first maps before all second maps; any strides.
            v: values [B, h_kv, T, dv].
            table: numbers of each sequence's pages in order, int32 [B, M].
            lengths: number of tokens of each sequence, these included, int32 [B]. Of a sequence that has fewer than T,
                the last of the T are stored; what lies behind 16 M is dropped.

        Raises:
            UsageError: tensors do not fit the pages.
        """
        batch, tokens = k.shape[0], k.shape[2]
        wrong = check_sequences(table, lengths, batch, self.keys.codes.device)
        for name, x, side in (("k", k, self.keys), ("v", v, self.values)):
            shape = (batch, side.codes.shape[1], tokens, side.width)
            if x.shape != shape or x.dtype != side.dtype or x.device != side.codes.device:
                wrong.append(
                    f"{name} is {x.dtype} {list(x.shape)} on {x.device}, and pages take {side.dtype} {list(shape)} "
                    f"on {side.codes.device}"
                )
        if wrong:
            raise UsageError("paged store: " + "; ".join(wrong))
        if not tokens:
            return
        # Wherever they begin in a page.
        steps = -(-(tokens - 1) // PAGE) + 1
        keys, values = self.keys, self.values
        heads = k.shape[1], v.shape[1]
        with torch.cuda.device_of(k):
            append_pages[(steps * batch * sum(heads),)](
                k, k.stride(), *keys.tensors[:3], v, v.stride(), *values.tensors[:3],
                table, table.stride(0), lengths, tokens, table.shape[1] * PAGE, steps, *heads,
                WIDTH=keys.width, VALUE_WIDTH=values.width, K_BITS=keys.scheme.bits, V_BITS=values.scheme.bits,
                K_LIMIT=largest_scale(keys.scheme.bits, k.dtype), V_LIMIT=largest_scale(values.scheme.bits, k.dtype),
                num_warps=4, enable_fp_fusion=True,
            )  # fmt: skip

    def read(self, table: Tensor, lengths: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys [1, H, length, d] and values [1, h_kv, length, dv] of each sequence, as they read back."""
        return [
            (_gathered(self.keys, pages, length), _gathered(self.values, pages, length))
            for pages, length in zip(table, lengths.tolist(), strict=True)
        ]


def paged_store_refusal(recipe: Recipe, width: int, value_width: int, dtype: torch.dtype) -> str | None:
    """Reason why a `PagedStore` cannot hold keys and values of these widths, or None."""
    for name, scheme in (("k", recipe.k), ("v", recipe.v)):
        if not scheme.quantizes:
            return f"{name} has 16 bits; `decode_paged` reads pages of states"
        if scheme.sharing.tokens > 1:
            return f"{name} has scales per {scheme.sharing.tokens} tokens; a page takes one a token (row)"
    if recipe.residual:
        return f"{recipe.residual} tokens stay unquantized; pages hold every token packed"
    return store_refusal(recipe, width, value_width, dtype)


def decode_packed_pages(
    q: Sequence[Tensor],
    store: PagedStore,
    table: Tensor,
    lengths: Tensor,
    lam: Tensor | None,
    *,
    scale: float,
    window: int | None = None,
    post: PairNorm | None = None,
) -> Tensor:
    """Causal attention of the newest tokens of sequences whose keys and values lie in packed pages.

    Args:
        q: one [B, h, T, d] a map, as `decode_paged` takes them.
        store: one layer's pages; keys of both maps (V1) or of one that both read.
        table, lengths, lam, scale, window, post: as `decode_paged` takes them.

    Returns:
        [B, h, T, dv], in memory [B, T, h, dv].

    Raises:
        UsageError: arguments disagree, or the kernels do not take them.
    """
    keys, values = store.keys, store.values
    k_heads, v_heads = keys.codes.shape[1], values.codes.shape[1]
    shared = len(q) == 2 and k_heads == v_heads
    wrong = check_sequences(table, lengths, q[0].shape[0], values.codes.device, window)
    if not shared and k_heads != len(q) * v_heads:
        wrong.append(f"{len(q)} maps cannot read {k_heads} key heads beside {v_heads} value heads")
    if wrong:
        raise UsageError("decode_packed_pages: " + "; ".join(wrong))
    like = keys.recent.new_empty(())
    shape = q[0].shape[0], v_heads, table.shape[1] * PAGE
    check_call(q, [like.expand(*shape, keys.width)] * len(q), like.expand(*shape, values.width), lam, post)
    norm = post or PairNorm(0.0)
    out = empty_output(q[0], values.width)
    if out.numel() == 0:
        return out
    q = [x if x.stride(3) == 1 else x.contiguous() for x in q]
    k_bits, v_bits = keys.scheme.bits, values.scheme.bits
    token_bits = k_heads // v_heads * keys.width * k_bits + values.width * v_bits
    tile = choose(TILES, f"decode/{device_class(out.device)}/{values.width}/{max(k_bits, v_bits)}")
    capacity = table.shape[1] * PAGE
    cut = Cut.of(tile, q, v_heads, token_bits, capacity, window)
    sums = cut.empty_sums(out)
    with torch.cuda.device_of(out):
        packed_pages_share[cut.grid](
            q[0], q[1] if len(q) == 2 else None, q[0].stride()[:3], q[-1].stride()[:3],
            *keys.tensors[:3], *values.tensors[:3], table, table.stride(0), lengths, *sums,
            scale * log2(e), window, capacity, cut.group, cut.noise_group, q[0].shape[2], k_heads, v_heads, 1,
            WIDTH=keys.width, VALUE_WIDTH=values.width, K_BITS=k_bits, V_BITS=v_bits, SHARED_K=shared,
            ROWS=ROWS, TOKENS=cut.tokens, WARPS=tile.warps, **cut.options,
        )  # fmt: skip
        cut.combine(sums, lam, norm.weight, out, post is not None, norm.eps, norm.factor)
    return out


def _gathered(side: StoredSide, pages: Tensor, length: int) -> Tensor:
    """A sequence's tokens [1, heads, length, width]."""
    pages = pages[: -(-length // PAGE)].long()
    codes = side.codes[pages].transpose(0, 2)
    top = side.top[pages].transpose(0, 2) if side.top.numel() else side.top[:1]
    scales = side.scales[pages].transpose(0, 1).flatten(1)[None]
    own = replace(side, codes=codes, top=top, scales=scales, recent=side.recent[:1])
    return own.read(length, 0)
