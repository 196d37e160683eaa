"""Packed keys and values in pages of 16 tokens: storage, appending, and attention of a few new queries over it.

A page is what a `KVStore` keeps of 16 tokens: fragments of each head, and scales: one a token, or of a block's channels
the part that its pages have each. Tokens that wait until their block is whole, or stay unquantized, are in a ring of
their sequence's. Tables, lengths and the rings' places are those of a server's scheduler and stand on the device. The
plain form is `diffquant.attention.naive` over what `PagedStore.read` gives.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import e, log2

import torch
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.family.norm import PairNorm
from diffquant.kernels.arguments import empty_output
from diffquant.kernels.cache.append import append_launches, largest_scale
from diffquant.kernels.cache.append_pages import append_pages
from diffquant.kernels.cache.decode_cut import ROWS, TILES, Cut
from diffquant.kernels.cache.kv_store import CAPACITY_STEP, StoredSide, store_refusal
from diffquant.kernels.cache.paged import PAGE, check_call, check_sequences
from diffquant.kernels.cache.paged_share import packed_pages_share
from diffquant.kernels.configs import choose
from diffquant.kernels.gpu import device_class
from diffquant.recipe import Recipe
from diffquant.scheme import Scheme

# Tokens of a block whose pages are those of one step of the smallest tile.
LARGEST_BLOCK = 64


class PagedStore:
    """Packed keys and values of one layer, in pages that tables give to sequences.

    Attributes:
        keys, values: storage of each, whose sequences are the pages, of 16 tokens each; scales per channel are
            [pages, heads, 16 w / block], and `recent` has sequences: the places.
    """

    def __init__(self, recipe: Recipe, k: Tensor, v: Tensor, pages: int, places: int = 0) -> None:
        """Empty pages for states as k [B, H, T, d] and v [B, h_kv, T, dv]; B and T do not matter.

        `places` is the number of sequences that may have tokens waiting, where the recipe lets any wait.

        Raises:
            UsageError: pages cannot hold such keys and values.
        """
        if reason := paged_store_refusal(recipe, k.shape[3], v.shape[3], k.dtype):
            raise UsageError(f"paged store: {reason}")

        self.keys = _empty_side(recipe.k, recipe.residual, False, k, pages, places)
        self.values = _empty_side(recipe.v, recipe.residual, True, v, pages, places)
        if self.waits and places < 1:
            raise UsageError(
                f"paged store: with k {recipe.k}, v {recipe.v} and a residual of {recipe.residual}, tokens wait "
                "unquantized; say how many sequences may at a time (places=)"
            )

    @property
    def waits(self) -> bool:
        """Whether tokens wait in a ring before they are packed."""
        return bool(self.keys.ring or self.values.ring)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages and rings."""
        return sum(x.untyped_storage().nbytes() for side in (self.keys, self.values) for x in side.tensors)

    def append(self, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, places: Tensor | None = None) -> None:
        """Store the newest tokens of each sequence.

        Where tokens wait, those before these have to be stored: a sequence's length grows by T a call, and one that was
        made shorter begins anew, or at the end of a whole block.

        Args:
            k: keys [B, H, T, d] in the states' dtype, all first maps before all second maps; any strides.
            v: values [B, h_kv, T, dv].
            table: numbers of each sequence's pages in order, int32 [B, M].
            lengths: number of tokens of each sequence, these included, int32 [B]. Of a sequence that has fewer than T,
                the last of the T are stored; what lies behind 16 M is dropped.
            places: ring of each sequence, int32 [B], where tokens wait; None elsewhere. No two may have the same.

        Raises:
            UsageError: tensors do not fit the pages.
        """
        batch, tokens = k.shape[0], k.shape[2]
        wrong = check_sequences(table, lengths, batch, self.keys.codes.device) + self.check_places(places, lengths)
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
        keys, values = self.keys, self.values
        heads = k.shape[1], v.shape[1]
        steps, phases = append_launches(tokens, keys.block, keys.ring, values.ring)
        with torch.cuda.device_of(k):
            for packs, keeps in phases:
                append_pages[(steps * batch * sum(heads),)](
                    k, k.stride(), *keys.tensors, v, v.stride(), *values.tensors,
                    table, table.stride(0), lengths, places, tokens, table.shape[1] * PAGE, steps, *heads,
                    WIDTH=keys.width, VALUE_WIDTH=values.width,
                    K_BITS=keys.scheme.bits, K_BLOCK=keys.block, K_RING=keys.ring,
                    V_BITS=values.scheme.bits, V_RING=values.ring, RESIDUAL=keys.residual,
                    K_LIMIT=largest_scale(keys.scheme.bits, k.dtype),
                    V_LIMIT=largest_scale(values.scheme.bits, k.dtype),
                    PACKS=packs, KEEPS=keeps, num_warps=4, enable_fp_fusion=True,
                )  # fmt: skip

    def read(self, table: Tensor, lengths: Tensor, places: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
        """Keys [1, H, length, d] and values [1, h_kv, length, dv] of each sequence, as they read back."""
        rings = [0] * len(table) if places is None else places.tolist()
        return [
            (_gathered(self.keys, pages, length, ring), _gathered(self.values, pages, length, ring))
            for pages, length, ring in zip(table, lengths.tolist(), rings, strict=True)
        ]

    def check_places(self, places: Tensor | None, lengths: Tensor) -> list[str]:
        """Describe what is wrong with the rings' places beside sequences' lengths."""
        if not self.waits:
            return ["places are given, and no token waits in these pages"] if places is not None else []
        if places is None:
            return ["tokens wait before they are packed: say in which ring each sequence's do (places)"]
        if (places.dtype, places.shape, places.device) != (torch.int32, lengths.shape, lengths.device):
            return [f"places are {places.dtype} {list(places.shape)} on {places.device}, not int32 as lengths are"]
        return []


def paged_store_refusal(recipe: Recipe, width: int, value_width: int, dtype: torch.dtype) -> str | None:
    """Reason why a `PagedStore` cannot hold keys and values of these widths, or None."""
    for name, scheme in (("k", recipe.k), ("v", recipe.v)):
        if not scheme.quantizes:
            return f"{name} has 16 bits; `decode_paged` reads pages of states"
        if scheme.sharing.tokens > LARGEST_BLOCK:
            return f"{name} has scales per {scheme.sharing.tokens} tokens; pages take row, c16, c32 and c64"
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
    places: Tensor | None = None,
) -> Tensor:
    """Causal attention of the newest tokens of sequences whose keys and values lie in packed pages.

    Args:
        q: one [B, h, T, d] a map, as `decode_paged` takes them.
        store: one layer's pages; keys of both maps (V1) or of one that both read.
        table, lengths, lam, scale, window, post: as `decode_paged` takes them. With a window the table has to name all
            pages of a block that a query sees a part of.
        places: ring of each sequence, as `PagedStore.append` takes them.

    Returns:
        [B, h, T, dv], in memory [B, T, h, dv].

    Raises:
        UsageError: arguments disagree, or the kernels do not take them.
    """
    keys, values = store.keys, store.values
    k_heads, v_heads = keys.codes.shape[1], values.codes.shape[1]
    shared = len(q) == 2 and k_heads == v_heads
    wrong = check_sequences(table, lengths, q[0].shape[0], values.codes.device, window)
    wrong += store.check_places(places, lengths)
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
    # One row of scales serves a warp's tokens.
    most_tokens = keys.block if keys.block > 1 else CAPACITY_STEP
    cut = Cut.of(tile, q, v_heads, token_bits, capacity, window, most_tokens)
    sums = cut.empty_sums(out)
    with torch.cuda.device_of(out):
        packed_pages_share[cut.grid](
            q[0], q[1] if len(q) == 2 else None, q[0].stride()[:3], q[-1].stride()[:3],
            *keys.tensors, *values.tensors, table, table.stride(0), lengths, places, *sums,
            scale * log2(e), window, capacity, cut.group, cut.noise_group, q[0].shape[2], k_heads, v_heads, 1,
            RESIDUAL=keys.residual, WIDTH=keys.width, VALUE_WIDTH=values.width,
            K_BITS=k_bits, K_BLOCK=keys.block, K_RING=keys.ring, V_BITS=v_bits, V_RING=values.ring, SHARED_K=shared,
            ROWS=ROWS, TOKENS=cut.tokens, WARPS=tile.warps, **cut.options,
        )  # fmt: skip
        cut.combine(sums, lam, norm.weight, out, post is not None, norm.eps, norm.factor)
    return out


def _empty_side(scheme: Scheme, residual: int, transposed: bool, like: Tensor, pages: int, places: int) -> StoredSide:
    """Pages for states as `like` [B, H, T, w], and rings for those that wait."""
    heads, width = like.shape[1], like.shape[3]
    block = scheme.sharing.tokens
    side = StoredSide.empty(scheme, residual, transposed, like.new_empty(()).expand(places, heads, 1, width), PAGE)

    def room(x: Tensor) -> Tensor:
        return x.new_zeros(pages, *x.shape[1:])

    scales = side.scales.new_zeros(pages, heads, PAGE * (width if block > 1 else 1) // block)
    return replace(side, codes=room(side.codes), top=room(side.top), scales=scales)


def _gathered(side: StoredSide, pages: Tensor, length: int, ring: int) -> Tensor:
    """A sequence's tokens [1, heads, length, width]."""
    # In order to have whole blocks of scales, of which those that are not packed are not read.
    pages = pages[: side.packed(length, 0) // PAGE if side.block > 1 else -(-length // PAGE)].long()
    codes = side.codes[pages].transpose(0, 2)
    top = side.top[pages].transpose(0, 2) if side.top.numel() else side.top[:1]
    scales = side.scales[pages].transpose(0, 1).flatten(1)[None]
    if side.block > 1:
        scales = scales.unflatten(2, (side.packed(length, 0) // side.block, side.width))
    own = replace(side, codes=codes, top=top, scales=scales, recent=side.recent[ring : ring + 1])
    return own.read(length, 0)
