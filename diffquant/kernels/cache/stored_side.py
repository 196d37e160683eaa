"""Stored keys or values of one layer, packed as the kernels read them.

Tokens and channels are stored in fragments of 16 by 16 in the register order of tensor cores (`kv_layout`), both codes
and 16-bit values. Stored numbers are code + 2^(bits-1). A 16-bit word contains codes of one token from several adjacent
fragments: 4 codes of 4 bits or 2 of 8. 6-bit codes are stored as words of their low 4 bits and bytes of their high 2
bits, as in weights (`diffquant.kernels.linear.repack`). Below, "states" are keys or values before quantization.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from diffquant.kernels.linear.repack import FRAGMENT
from diffquant.recipe.numbers.absmax import dequantize
from diffquant.recipe.scheme import Scheme

# Number of tokens that are packed together, even if each has its own scale.
TOKENS_A_STEP = FRAGMENT


@dataclass
class StoredKeysOrValues:
    """Stored keys or values of one layer, with memory for C tokens of H heads with w channels.

    F is the number of channels in a 16-bit word (`channels_in_word`).

    Attributes:
        scheme: number format and granularity.
        residual: number of newest tokens that stay unquantized.
        transposed: whether rows of a fragment are channels (values) instead of tokens (keys).
        codes: codes, int16 [B, H, C/16, w/(16·F), 256], or unquantized keys or values, with F = 1.
        top: high 2 bits of 6-bit codes, int16 [B, H, C/16, w/64, 128], one byte per word of `codes`, else empty.
        scales: scales in the keys' or values' dtype, [B, H, C] per token, [B, H, C / block, w] per channel; empty at 16
            bits.
        recent: ring of the newest tokens, unquantized, [B, H, ring/16, w/16, 256]; empty at 16 bits or if tokens are
            packed at once.
    """

    scheme: Scheme
    residual: int
    transposed: bool
    codes: Tensor
    top: Tensor
    scales: Tensor
    recent: Tensor

    @classmethod
    def empty(
        cls, scheme: Scheme, residual: int, transposed: bool, like: Tensor, capacity: int
    ) -> "StoredKeysOrValues":
        """Allocate storage for `capacity` tokens of keys or values with the B, H, w, dtype and device of `like`.

        Args:
            scheme, residual, transposed: as in the class.
            like: keys or values [B, H, T, w], for any T.
            capacity: number of tokens, a multiple of 16.
        """
        batch, heads, _, width = like.shape
        block = scheme.sharing.tokens_per_scale
        ring = _ring_length(scheme, residual)

        def room(*shape: int, dtype: torch.dtype = like.dtype) -> Tensor:
            # Zeros, since kernels also read memory beyond the newest token, with weight 0.
            return torch.zeros(batch, heads, *shape, dtype=dtype, device=like.device)

        blocks, chunks = capacity // FRAGMENT, width // (FRAGMENT * channels_in_word(scheme.bits))
        no_top = room(0, dtype=torch.int16)
        if not scheme.quantizes:
            return cls(
                scheme, 0, transposed, room(blocks, chunks, 256), no_top, room(0), room(0, width // FRAGMENT, 256)
            )
        return cls(
            scheme,
            residual,
            transposed,
            codes=room(blocks, chunks, 256, dtype=torch.int16),
            top=room(blocks, chunks, 128, dtype=torch.int16) if scheme.bits == 6 else no_top,
            scales=room(capacity) if block == 1 else room(capacity // block, width),
            recent=room(ring // FRAGMENT, width // FRAGMENT, 256),
        )

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors in the order of the kernels' arguments: codes, top, scales and recent."""
        return [self.codes, self.top, self.scales, self.recent]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the unquantized keys or values."""
        return self.recent.dtype

    @property
    def width(self) -> int:
        """Number of channels of a head, w."""
        return self.codes.shape[3] * FRAGMENT * channels_in_word(self.scheme.bits)

    @property
    def tokens_per_scale(self) -> int:
        """Number of tokens that share per-channel scales; 1 with per-token scales."""
        return self.scheme.sharing.tokens_per_scale

    @property
    def ring_size(self) -> int:
        """Number of tokens that fit in `recent`."""
        return self.recent.shape[2] * FRAGMENT

    def count_packed(self, length: int, least_packed: int) -> int:
        """Return how many of `length` tokens are packed; at least `floor`, the number after the last `KVStore.crop`."""
        if not self.scheme.quantizes:
            return length
        return max(least_packed, (length - self.residual) // self.tokens_per_scale * self.tokens_per_scale)

    def read(self, length: int, least_packed: int) -> Tensor:
        """Return dequantized keys or values [B, H, length, w] in their original dtype; `floor` as in `count_packed`."""
        packed = self.count_packed(length, least_packed)
        if not self.scheme.quantizes:
            return self._in_order(self.codes[..., None], length)
        codes = self._unpack(packed)
        if self.tokens_per_scale == 1:
            old = dequantize(codes, self.scales[:, :, :packed, None])
        else:
            blocks = self.scales[:, :, : -(-packed // self.tokens_per_scale)]
            old = dequantize(codes, blocks.repeat_interleave(self.tokens_per_scale, 2)[:, :, :packed])
        if not self.ring_size:
            return old
        slots = torch.arange(packed, length, device=codes.device) % self.ring_size
        return torch.cat([old, self._in_order(self.recent[..., None], self.ring_size).index_select(2, slots)], 2)

    def clear(self, first: int, stop: int) -> None:
        """Set the unquantized keys or values of forgotten tokens, `first` up to exclusive `stop`, to 0.

        Kernels multiply memory beyond the newest token by 0, which would not remove NaN. Codes are always finite.
        """
        if not self.scheme.quantizes:
            self._clear(self.codes, torch.arange(first, stop, device=self.codes.device))
        elif self.ring_size:
            slots = torch.arange(max(first, stop - self.ring_size), stop, device=self.codes.device) % self.ring_size
            self._clear(self.recent, slots)

    def _clear(self, states: Tensor, tokens: Tensor) -> None:
        """Set the given tokens of 16-bit states, stored in fragments, to 0."""
        at = tokens % FRAGMENT
        # (row of 8, column pair of 4, column half, row half, column of a pair), of which a token is a row or a column.
        parts = states.unflatten(4, (8, 4, 2, 2, 2))
        if self.transposed:
            parts[:, :, tokens // FRAGMENT, :, :, at // 2 % 4, at // 8, :, at % 2] = 0
        else:
            parts[:, :, tokens // FRAGMENT, :, at % 8, :, :, at // 8] = 0

    def _unpack(self, tokens: int) -> Tensor:
        """Unpack the codes of the first tokens, int8 [B, H, tokens, w]."""
        bits = self.scheme.bits
        width = 8 if bits == 8 else 4
        shifts = torch.arange(0, 16, width, dtype=torch.int16, device=self.codes.device)
        blocks = slice(0, -(-tokens // FRAGMENT))
        stored = (self.codes[:, :, blocks, ..., None] >> shifts) & ((1 << width) - 1)
        if bits == 6:
            top = self.top[:, :, blocks].view(torch.uint8)[..., None].to(torch.int16)
            stored |= (top >> (shifts // 2) & 3) << 4
        return (self._in_order(stored, tokens) - (1 << (bits - 1))).to(torch.int8)

    def _in_order(self, fields: Tensor, tokens: int) -> Tensor:
        """Reorder fragments [B, H, blocks, chunks, 256, fields] to [B, H, tokens, w], for the first tokens."""
        # (block, chunk, row of 8, column pair of 4, column half, row half, column of a pair, field)
        parts = fields.unflatten(4, (8, 4, 2, 2, 2))
        row, column = (7, 4), (6, 5, 8)
        tokens_at, channels_at = (column, row) if self.transposed else (row, column)
        ordered: Tensor = parts.permute(0, 1, 2, *tokens_at, 3, 9, *channels_at)
        return ordered.flatten(2, 2 + len(tokens_at)).flatten(3)[:, :, :tokens]


def channels_in_word(bits: int) -> int:
    """Return the number of channels in a 16-bit word: 2 of 8 bits, 4 of 4 or 6 bits, or 1 of 16 bits."""
    return {16: 1, 8: 2}.get(bits, 4)


def _ring_length(scheme: Scheme, residual: int) -> int:
    """Return how many tokens a ring of unquantized tokens holds: whole steps, so that no step wraps around its end.

    It is 0 if the scheme is 16 bits or packs tokens at once.
    """
    waiting = residual + scheme.sharing.tokens_per_scale - 1
    step = max(scheme.sharing.tokens_per_scale, TOKENS_A_STEP)
    return -(-waiting // step) * step if scheme.quantizes else 0
