"""Packed keys and values in pages of 16 tokens: storage, appending, and decode attention.

A page contains the fragments of 16 tokens for each head, as in a `KVStore`, and scales: one per token, or an equal part
of its block's per-channel scales. Unquantized tokens (the residual, and tokens whose block is not full) are in a ring
buffer of their sequence. Page tables, lengths and ring indices are given by a server's scheduler, on the device. The
reference is `diffquant.attention.naive` over the result of `PagedStore.read`.
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
from diffquant.kernels.cache.append_tokens import append_pages
from diffquant.kernels.cache.decode_cut import ROWS, TILES, DecodeSplit, choose_tile
from diffquant.kernels.cache.decode_share import packed_pages_share
from diffquant.kernels.cache.kv_store import CAPACITY_STEP, StoredKeysOrValues, store_refusal
from diffquant.kernels.cache.paged import PAGE, check_call, check_sequences
from diffquant.kernels.gpu import device_class
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import Scheme

# Largest block, whose pages fit in one step of the smallest tile.
LARGEST_BLOCK = 64


class PagedStore:
    """Packed keys and values of one layer in pages, which page tables assign to sequences.

    Attributes:
        keys, values: storage whose batch axis is the page, with 16 tokens each. Per-channel scales are
            [pages, heads, 16 w / block]. The batch axis of `recent` is the ring ("place").
    """

    def __init__(self, recipe: Recipe, k: Tensor, v: Tensor, pages: int, places: int = 0) -> None:
        """Create empty pages for keys like k [B, H, T, d] and values like v [B, h_kv, T, dv], for any B and T.

        `places` is the number of rings, one per sequence, if the recipe leaves tokens unquantized.

        Raises:
            UsageError: pages cannot store such keys and values.
        """
        if reason := paged_store_refusal(recipe, k.shape[3], v.shape[3], k.dtype):
            raise UsageError(f"paged store: {reason}")

        self.keys = _empty_side(recipe.k, recipe.residual, False, k, pages, places)
        self.values = _empty_side(recipe.v, recipe.residual, True, v, pages, places)
        if self.waits and places < 1:
            raise UsageError(
                f"paged store: with k {recipe.k}, v {recipe.v} and a residual of {recipe.residual}, tokens wait "
                "unquantized; give the number of sequences that have such tokens (places=)"
            )

    @property
    def waits(self) -> bool:
        """Whether tokens are kept in a ring before they are packed."""
        return bool(self.keys.ring or self.values.ring)

    @property
    def nbytes(self) -> int:
        """Allocated bytes of all pages and rings."""
        return sum(x.untyped_storage().nbytes() for side in (self.keys, self.values) for x in side.tensors)

    def append(self, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, places: Tensor | None = None) -> None:
        """Store the newest tokens of each sequence.

        With rings, all earlier tokens must have been stored: a sequence's length grows by T per call, and a shortened
        sequence must continue from length 0 or from the end of a whole block.

        Args:
            k: new keys [B, H, T, d], heads of the first map before those of the second, any strides.
            v: new values [B, h_kv, T, dv].
            table: page numbers of each sequence in order, int32 [B, M].
            lengths: number of tokens of each sequence including the new ones, int32 [B]. For a length below T, only the
                last new tokens are stored; tokens beyond 16 M are dropped.
            places: index of each sequence's ring, int32 [B], all different; omitted if the recipe needs no rings.

        Raises:
            UsageError: the tensors do not match the pages.
        """
        batch, tokens = k.shape[0], k.shape[2]
        wrong = check_sequences(table, lengths, batch, self.keys.codes.device) + self.check_places(places, lengths)
        for name, x, side in (("k", k, self.keys), ("v", v, self.values)):
            shape = (batch, side.codes.shape[1], tokens, side.width)
            if x.shape != shape or x.dtype != side.dtype or x.device != side.codes.device:
                wrong.append(
                    f"{name} is {x.dtype} {list(x.shape)} on {x.device}, but pages expect {side.dtype} {list(shape)} "
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
        """Return the dequantized keys [1, H, length, d] and values [1, h_kv, length, dv] of each sequence."""
        rings = [0] * len(table) if places is None else places.tolist()
        return [
            (_gather(self.keys, pages, length, ring), _gather(self.values, pages, length, ring))
            for pages, length, ring in zip(table, lengths.tolist(), rings, strict=True)
        ]

    def check_places(self, places: Tensor | None, lengths: Tensor) -> list[str]:
        """Return a list of problems with the ring indices for sequences with these lengths."""
        if not self.waits:
            return ["places are given, but these pages need no rings"] if places is not None else []
        if places is None:
            return ["tokens wait in rings before they are packed: give each sequence's ring (places)"]
        if (places.dtype, places.shape, places.device) != (torch.int32, lengths.shape, lengths.device):
            return [f"places are {places.dtype} {list(places.shape)} on {places.device}, not int32 as lengths are"]
        return []


def paged_store_refusal(recipe: Recipe, width: int, value_width: int, dtype: torch.dtype) -> str | None:
    """Return why a `PagedStore` cannot store keys and values of these widths under a recipe, or None."""
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
    """Compute causal attention of the newest tokens of sequences whose keys and values lie in packed pages.

    Args:
        q: queries, [B, h, T, d] per map, as in `decode_paged`.
        store: one layer's pages; keys of both maps (V1) or keys that both maps share.
        table, lengths, lam, scale, window, post: as in `decode_paged`. With a window, all pages of a block must be in
            the table if a query sees a part of the block.
        places: index of each sequence's ring, as in `PagedStore.append`.

    Returns:
        [B, h, T, dv], in memory [B, T, h, dv].

    Raises:
        UsageError: arguments disagree, or the kernels do not support them.
    """
    keys, values = store.keys, store.values
    k_heads, v_heads = keys.codes.shape[1], values.codes.shape[1]
    shared = len(q) == 2 and k_heads == v_heads
    wrong = check_sequences(table, lengths, q[0].shape[0], values.codes.device, window)
    wrong += store.check_places(places, lengths)
    if not shared and k_heads != len(q) * v_heads:
        wrong.append(f"{len(q)} maps cannot read {k_heads} key heads and {v_heads} value heads")
    if wrong:
        raise UsageError("decode_packed_pages: " + "; ".join(wrong))
    like = keys.recent.new_empty(())
    shape = q[0].shape[0], v_heads, table.shape[1] * PAGE
    check_call(q, [like.expand(*shape, keys.width)] * len(q), like.expand(*shape, values.width), lam, post)
    out = empty_output(q[0], values.width)
    if out.numel() == 0:
        return out
    q = [x if x.stride(3) == 1 else x.contiguous() for x in q]
    k_bits, v_bits = keys.scheme.bits, values.scheme.bits
    token_bits = k_heads // v_heads * keys.width * k_bits + values.width * v_bits
    tile = choose_tile(TILES, f"decode/{device_class(out.device)}/{values.width}/{max(k_bits, v_bits)}")
    capacity = table.shape[1] * PAGE
    # With scales per block, a warp's tokens must lie in one block.
    most_tokens = keys.block if keys.block > 1 else CAPACITY_STEP
    cut = DecodeSplit.of(tile, q, v_heads, token_bits, capacity, window, most_tokens)
    sums = cut.allocate_partials(out)
    with torch.cuda.device_of(out):
        packed_pages_share[cut.grid](
            q[0], q[1] if len(q) == 2 else None, q[0].stride()[:3], q[-1].stride()[:3],
            *keys.tensors, *values.tensors, table, table.stride(0), lengths, places, *sums,
            scale * log2(e), window, capacity, cut.group, cut.noise_group, q[0].shape[2], k_heads, v_heads, 1,
            RESIDUAL=keys.residual, WIDTH=keys.width, VALUE_WIDTH=values.width,
            K_BITS=k_bits, K_BLOCK=keys.block, K_RING=keys.ring, V_BITS=v_bits, V_RING=values.ring, SHARED_K=shared,
            ROWS=ROWS, TOKENS=cut.tokens, WARPS=tile["warps"], **cut.options,
        )  # fmt: skip
        cut.combine(sums, lam, post, out)
    return out


def _empty_side(
    scheme: Scheme, residual: int, transposed: bool, like: Tensor, pages: int, places: int
) -> StoredKeysOrValues:
    """Allocate pages, and rings if needed, for keys or values like `like` [B, H, T, w]."""
    heads, width = like.shape[1], like.shape[3]
    block = scheme.sharing.tokens
    side = StoredKeysOrValues.empty(
        scheme, residual, transposed, like.new_empty(()).expand(places, heads, 1, width), PAGE
    )

    def room(x: Tensor) -> Tensor:
        return x.new_zeros(pages, *x.shape[1:])

    scales = side.scales.new_zeros(pages, heads, PAGE * (width if block > 1 else 1) // block)
    return replace(side, codes=room(side.codes), top=room(side.top), scales=scales)


def _gather(side: StoredKeysOrValues, pages: Tensor, length: int, ring: int) -> Tensor:
    """Gather a sequence's tokens from its pages and ring, dequantized, [1, heads, length, width]."""
    # Rounded up to whole blocks of scales; scales of tokens that are not packed are not read.
    pages = pages[: side.count_packed(length, 0) // PAGE if side.block > 1 else -(-length // PAGE)].long()
    codes = side.codes[pages].transpose(0, 2)
    top = side.top[pages].transpose(0, 2) if side.top.numel() else side.top[:1]
    scales = side.scales[pages].transpose(0, 1).flatten(1)[None]
    if side.block > 1:
        scales = scales.unflatten(2, (side.count_packed(length, 0) // side.block, side.width))
    own = replace(side, codes=codes, top=top, scales=scales, recent=side.recent[ring : ring + 1])
    return own.read(length, 0)
