"""Divides decode attention among programs, each with a tile of rows and a share of the keys, and combines results."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.family.norm import PairNorm
from diffquant.kernels.attention.online import LOWEST, pair_norm
from diffquant.kernels.cache.kv_layout import count_packed_tokens, field_channels, value_channels
from diffquant.kernels.cache.kv_store import CAPACITY_STEP
from diffquant.kernels.configs import Config, choose_config
from diffquant.kernels.gpu import bandwidth, multiprocessors, registers_per_thread
from diffquant.kernels.linear.repack import FRAGMENT


@triton.jit
def find_program_keys(
    Progress, Starts, Ends, sequence, row, queries, window,
    RESIDUAL: tl.constexpr, K_BITS: tl.constexpr, K_BLOCK: tl.constexpr, V_BITS: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Return which keys of a store each of a program's rows sees, and the share of the keys that the program reads.

    Returns:
        first, position: first and last key that each row sees.
        begin, end: the share, keys `begin` to exclusive `end`; `begin` is a multiple of STEP.
        k_packed, v_packed: number of packed keys and values.
    """
    length = tl.load(Progress)
    position = length - queries + row % queries
    first = tl.zeros([ROWS], tl.int32)
    begin = 0
    if Starts is not None:
        begin = tl.minimum(tl.maximum(tl.load(Starts + sequence), 0), length)
        first += begin
    if Ends is not None:
        # A query beyond the valid range is padding, and no other query sees keys there.
        first = tl.where(position < tl.load(Ends + sequence), first, length)
    if window is not None:
        first = tl.maximum(first, position - window + 1)
        begin = tl.maximum(begin, length - queries - window + 1)
    begin = begin // STEP * STEP
    share = tl.cdiv(tl.cdiv(length - begin, STEP), tl.num_programs(1)) * STEP
    begin += tl.program_id(1) * share
    end = tl.minimum(begin + share, length)
    k_packed = count_packed_tokens(length, tl.load(Progress + 1), K_BITS, K_BLOCK, RESIDUAL)
    v_packed = count_packed_tokens(length, tl.load(Progress + 2), V_BITS, 1, RESIDUAL)
    return first, position, begin, end, k_packed, v_packed


@triton.jit
def initial_sums(
    WARPS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, FIELDS: tl.constexpr
):
    """Return initial accumulators: row maxima, sums of weights, and a tuple of weighted values.

    The tuple has one tensor for each of FIELDS channels in a word of stored values; see `kv_layout`.
    """
    acc = ()
    for _ in tl.static_range(FIELDS):
        acc += (tl.zeros([WARPS, WIDTH // FIELDS, ROWS], tl.float32),)
    return tl.full([WARPS, ROWS], LOWEST, tl.float32), tl.zeros([WARPS, TOKENS, ROWS], tl.float32), acc


@triton.jit
def store_partial_sums(
    sums, Largest, Total, Acc,
    FIELDS: tl.constexpr, IN_ROWS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Combine the warps' accumulators and store them as the partial results of the program's share of the keys.

    `sums` are accumulators as in `initial_sums`. IN_ROWS means that values were read from pages, so that channels are
    in the order of `value_channels`.
    """
    largest, total, acc = sums
    of_all = tl.max(largest, 0)
    shrink = tl.exp2(largest - of_all[None, :])
    total = tl.sum(tl.sum(total, 1) * shrink, 0)
    tile_index = tl.program_id(0).to(tl.int64) * tl.num_programs(2) + tl.program_id(2)
    out = (tile_index * tl.num_programs(1) + tl.program_id(1)) * ROWS + tl.arange(0, ROWS)
    tl.store(Largest + out, of_all)
    tl.store(Total + out, total)
    for field in tl.static_range(FIELDS):
        channel = value_channels(WIDTH) if IN_ROWS else field_channels(field, WIDTH, FIELDS)
        weighed = tl.sum(acc[field] * shrink[:, None, :], 0)
        tl.store(Acc + out[None, :] * WIDTH + channel[:, None], weighed)


# Lengths change from call to call, and specializing on their divisibility by 16 would only add compilations.
@triton.jit(do_not_specialize=["queries", "shares", "tiles"])
def decode_combine(
    Largest, Total, Acc, Lam, Weight, Out, lam_stride, out_stride, pairs, group, noise_group, queries,
    shares, tiles, eps, factor,
    NORM: tl.constexpr, ROWS: tl.constexpr, SHARES: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute the output of one query of one pair from the shares' partial results."""
    query = tl.program_id(0) % queries
    pair = tl.program_id(0) // queries % pairs
    sequence = (tl.program_id(0) // queries // pairs).to(tl.int64)
    first_tile = (sequence * (pairs // group) + pair // group) * tiles
    row = pair % group * queries + query
    out = _combine_shares(Largest, Total, Acc, first_tile, row, shares, ROWS, SHARES, VALUE_WIDTH)
    if Lam is not None:
        lam = tl.load(Lam + sequence * lam_stride[0] + pair * lam_stride[1] + query * lam_stride[2])
        row = (group + pair % group // (group // noise_group)) * queries + query
        out -= lam * _combine_shares(Largest, Total, Acc, first_tile, row, shares, ROWS, SHARES, VALUE_WIDTH)
    if NORM:
        out = pair_norm(out, Weight, eps, factor, VALUE_WIDTH)
    column = tl.arange(0, VALUE_WIDTH)[None, :]
    at = Out + sequence * out_stride[0] + pair * out_stride[1] + query * out_stride[2]
    tl.store(at + column, out.to(Out.dtype.element_ty))


@triton.jit
def _combine_shares(
    Largest, Total, Acc, first_tile, row, shares,
    ROWS: tl.constexpr, SHARES: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """Combine the shares of one row to softmax(Q·Kᵀ·scale)·V, [1, VALUE_WIDTH]; 0 if the row saw no key."""
    first = (first_tile + row // ROWS) * shares * ROWS + row % ROWS
    share = tl.arange(0, SHARES)
    of_all = tl.load(Largest + first + share * ROWS, mask=share < shares, other=LOWEST)
    largest = tl.max(of_all, 0)
    total = tl.sum(tl.load(Total + first + share * ROWS, mask=share < shares, other=0.0) * tl.exp2(of_all - largest), 0)
    STEP: tl.constexpr = 16 if SHARES > 16 else SHARES
    out = tl.zeros([VALUE_WIDTH], tl.float32)
    for begin in range(0, shares, STEP):
        some = begin + tl.arange(0, STEP)
        at = first + some * ROWS
        weight = tl.exp2(tl.load(Largest + at, mask=some < shares, other=LOWEST) - largest)
        # Values of a share without visible keys are not read, since their weight is 0.
        read = (some < shares) & (weight > 0)
        column = tl.arange(0, VALUE_WIDTH)[None, :]
        values = tl.load(Acc + at[:, None] * VALUE_WIDTH + column, mask=read[:, None], other=0.0)
        out += tl.sum(values * weight[:, None], 0)
    return (out * tl.where(total == 0, 0.0, 1.0 / tl.where(total == 0, 1.0, total)))[None, :]


def make_decode_config(tokens: int, warps: int, blocks: int) -> Config:
    """Return a launch configuration of `decode_key_split` as a table's entry.

    Args:
        tokens: number of tokens per warp and step, a multiple of 16.
        warps: number of warps.
        blocks: number of thread blocks per multiprocessor; registers per thread are limited so that they fit.
    """
    return {"tokens": tokens, "warps": warps, "blocks": blocks}


def choose_decode_config(table: Mapping[str, Config], key: str) -> Config:
    """Return a decode kernel's launch configuration: the entry `key` of a table, with the user's tuned values.

    Raises:
        UsageError: with tuned values, the tokens per warp are not a multiple of 16, or the tokens of a step of all
            warps do not divide CAPACITY_STEP, of which a store's capacity is a multiple.
    """
    tile = choose_config(table, key)
    tokens, warps = tile["tokens"], tile["warps"]
    if tokens % FRAGMENT or CAPACITY_STEP % (tokens * warps):
        raise UsageError(
            f"decode: tuned to {warps} warps of {tokens} tokens; tokens must be a multiple of {FRAGMENT}, and a step "
            f"of all warps must divide {CAPACITY_STEP}, in which a store grows"
        )
    return tile


# By the values' width and the larger bits of K and V: as many tokens and blocks as registers can hold codes,
# accumulators and queries for.
_SIZES = {
    **{(64, 4): (32, 4), (64, 6): (32, 4), (64, 8): (32, 4), (64, 16): (16, 4)},
    **{(128, 4): (32, 3), (128, 6): (32, 3), (128, 8): (16, 3), (128, 16): (16, 4)},
    **{(256, 4): (32, 2), (256, 6): (16, 2), (256, 8): (16, 2), (256, 16): (16, 3)},
}
TILES = {
    f"decode/{device}/{width}/{bits}": make_decode_config(tokens, 4, blocks)
    for device in ("sm_80", "sm_90")
    for (width, bits), (tokens, blocks) in _SIZES.items()
}
# Rows of a tile, which are columns of the transposed products.
ROWS = 8
# Assumed times: of a share's start and end (first loads and storing of partial results), and least time of a step.
_SECONDS_TO_START, _SECONDS_OF_LOADS = 1e-6, 0.5e-6


@dataclass(frozen=True)
class DecodeSplit:
    """Division of a decode call among programs. A row is one query of one map.

    Attributes:
        tile: launch configuration.
        tokens: number of tokens per warp and step.
        heads: number of KV heads, summed over sequences.
        group: number of pairs per KV head.
        noise_group: number of noise heads per KV head; equal to `group` if there is one map.
        shares: number of splits of the keys (split-K).
        tiles: number of tiles of rows per KV head.
        rows: number of rows per tile.
    """

    tile: Config
    tokens: int
    heads: int
    group: int
    noise_group: int
    shares: int
    tiles: int
    rows: int = ROWS

    @classmethod
    def of(
        cls,
        tile: Config,
        q: Sequence[Tensor],
        v_heads: int,
        token_bits: int,
        capacity: int,
        window: int | None,
        most_tokens: int = CAPACITY_STEP,
        rows: int = ROWS,
    ) -> "DecodeSplit":
        """Choose the division of a call that takes the least estimated time.

        Args:
            tile: launch configuration.
            q: queries, [B, h, T, d] per map.
            v_heads: number of KV heads of a sequence.
            token_bits: bits of one token's keys and values of one KV head.
            capacity: largest number of tokens of a sequence.
            window: number of newest keys that a query sees, or None if it sees all.
            most_tokens: upper limit of tokens per warp and step.
            rows: number of rows per tile.
        """
        batch, pairs, queries, _ = q[0].shape
        tokens = min(tile["tokens"], most_tokens)
        group, noise_group = pairs // v_heads, q[-1].shape[1] // v_heads
        tiles = triton.cdiv((group + (noise_group if len(q) == 2 else 0)) * queries, rows)
        step = tokens * tile["warps"]
        # A window may begin within a step and end within another.
        seen = capacity if window is None else min(capacity, window + queries - 1 + step)
        room = tile["blocks"] * multiprocessors(q[0].device)
        # Time of a step, limited by memory bandwidth, which all concurrent programs share.
        pace = max(_SECONDS_OF_LOADS, room * step * token_bits / 8 / bandwidth(q[0].device))
        start = _SECONDS_TO_START / pace
        shares = choose_split_count(batch * v_heads * tiles, max(seen // step, 1), room, start)
        return cls(tile, tokens, batch * v_heads, group, noise_group, shares, tiles, rows)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Launch grid of the kernel that computes the shares' partial results."""
        return self.heads, self.shares, self.tiles

    @property
    def options(self) -> dict[str, Any]:
        """Triton's compilation options for the kernel that computes the shares' partial results."""
        tile = self.tile
        registers = registers_per_thread(tile["blocks"], tile["warps"])
        return {"num_warps": tile["warps"], "num_stages": 1, "maxnreg": registers, "enable_fp_fusion": True}

    def allocate_partials(self, out: Tensor) -> list[Tensor]:
        """Allocate the shares' partial maxima, sums and weighted values for an output [B, h, T, dv]."""
        places = self.heads * self.tiles, self.shares, self.rows
        return [out.new_empty(*places, *shape, dtype=torch.float32) for shape in ((), (), (out.shape[3],))]

    def combine(self, sums: Sequence[Tensor], lam: Tensor | None, post: PairNorm | None, out: Tensor) -> None:
        """Combine the shares' partial results into the output [B, h, T, dv], with λ and the pair norm."""
        batch, pairs, queries, value_width = out.shape
        norm = post or PairNorm(0.0)
        lam = None if lam is None else lam.float().expand(batch, pairs, queries, 1)
        decode_combine[(batch * pairs * queries,)](
            *sums, lam, norm.weight, out, lam.stride()[:3] if lam is not None else (0, 0, 0), out.stride()[:3],
            pairs, self.group, self.noise_group, queries, self.shares, self.tiles, norm.eps, norm.factor,
            NORM=post is not None, ROWS=self.rows, SHARES=triton.next_power_of_2(self.shares), VALUE_WIDTH=value_width,
            num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip


@cache
def choose_split_count(programs_per_split: int, steps: int, programs_per_wave: int, start_cost: float) -> int:
    """Return the number of splits of the keys (split-K) with the shortest estimated run time.

    Args:
        programs_per_split: programs per split.
        steps: key blocks in total.
        programs_per_wave: programs that run at a time, one wave.
        start_cost: fixed cost of a wave, in key blocks.
    """

    def steps_in_a_row(shares: int) -> float:
        return -(-programs_per_split * shares // programs_per_wave) * (-(-steps // shares) + start_cost)

    return min(range(1, min(steps, programs_per_wave) + 1), key=steps_in_a_row)
