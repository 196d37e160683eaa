"""How decoding is cut into programs: tiles of a KV head's rows, and shares of the keys that run side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.kernels.cache.decode_combine import decode_combine
from diffquant.kernels.cache.kv_store import CAPACITY_STEP
from diffquant.kernels.gpu import bandwidth, processors, registers_of
from diffquant.kernels.linear.repack import FRAGMENT


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
# Rows of a tile: the columns of a product, whose rows are tokens or channels.
ROWS = 8
# What a share's start and end cost, its first loads and its partial sums, and the least that a step's loads take:
# assumptions.
_SECONDS_TO_START, _SECONDS_OF_LOADS = 1e-6, 0.5e-6


@dataclass(frozen=True)
class Cut:
    """A call's programs.

    Attributes:
        tile: block of a program.
        tokens: number of tokens that a warp takes of a step.
        heads: number of KV heads of all sequences.
        group: number of query pairs that read a KV head.
        noise_group: number of noise heads that do; that of the pairs with one map.
        shares: number of shares that the keys are split into.
        tiles: number of tiles of a KV head's rows.
        rows: number of rows of a tile.
    """

    tile: DecodeTile
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
        tile: DecodeTile,
        q: Sequence[Tensor],
        v_heads: int,
        token_bits: int,
        capacity: int,
        window: int | None,
        most_tokens: int = CAPACITY_STEP,
        rows: int = ROWS,
    ) -> "Cut":
        """Cut for queries [B, h, T, d] a map.

        Args:
            token_bits: bits of a token's keys and values of one KV head.
            capacity: number of tokens that a sequence may have.
            window: number of newest keys that a query sees; None if there is no window.
            most_tokens: most tokens of a step that a warp may take.
            rows: number of rows of a tile.
        """
        batch, pairs, queries, _ = q[0].shape
        tokens = min(tile.tokens, most_tokens)
        group, noise_group = pairs // v_heads, q[-1].shape[1] // v_heads
        tiles = triton.cdiv((group + (noise_group if len(q) == 2 else 0)) * queries, rows)
        step = tokens * tile.warps
        # A window may begin within a step and end within another.
        seen = capacity if window is None else min(capacity, window + queries - 1 + step)
        room = tile.blocks * processors(q[0].device)
        # Memory sets the pace: all programs that there is room for share it.
        pace = max(_SECONDS_OF_LOADS, room * step * token_bits / 8 / bandwidth(q[0].device))
        start = _SECONDS_TO_START / pace
        shares = count_shares(batch * v_heads * tiles, max(seen // step, 1), room, start)
        return cls(tile, tokens, batch * v_heads, group, noise_group, shares, tiles, rows)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Programs of the first kernel."""
        return self.heads, self.shares, self.tiles

    @property
    def options(self) -> dict[str, Any]:
        """Options that the first kernel is compiled with."""
        tile = self.tile
        registers = registers_of(tile.blocks, tile.warps)
        return {"num_warps": tile.warps, "num_stages": 1, "maxnreg": registers, "enable_fp_fusion": True}

    def empty_sums(self, out: Tensor) -> list[Tensor]:
        """Room for the partial maxima, sums and weighted values of an output [B, h, T, dv]."""
        places = self.heads * self.tiles, self.shares, self.rows
        return [out.new_empty(*places, *shape, dtype=torch.float32) for shape in ((), (), (out.shape[3],))]

    def combine(
        self,
        sums: Sequence[Tensor],
        lam: Tensor | None,
        weight: Tensor | None,
        out: Tensor,
        normed: bool,
        eps: float,
        factor: float,
    ) -> None:
        """Write the output [B, h, T, dv] that the shares' sums amount to."""
        batch, pairs, queries, value_width = out.shape
        lam = None if lam is None else lam.float().expand(batch, pairs, queries, 1)
        decode_combine[(batch * pairs * queries,)](
            *sums, lam, weight, out, lam.stride()[:3] if lam is not None else (0, 0, 0), out.stride()[:3],
            pairs, self.group, self.noise_group, queries, self.shares, self.tiles, eps, factor,
            NORM=normed, ROWS=self.rows, SHARES=triton.next_power_of_2(self.shares), VALUE_WIDTH=value_width,
            num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip


@cache
def count_shares(others: int, steps: int, room: int, start: float) -> int:
    """Number of shares that the keys are split into, for which a device with room for `room` programs ends first.

    Args:
        others: number of programs a share.
        steps: number of steps of all keys.
        room: number of programs that run at a time; they come in waves.
        start: number of steps that a wave's start and end take as long as.
    """

    def steps_in_a_row(shares: int) -> float:
        return -(-others * shares // room) * (-(-steps // shares) + start)

    return min(range(1, min(steps, room) + 1), key=steps_in_a_row)
