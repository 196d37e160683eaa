"""Storage of one layer's KV cache as the kernels want it: preallocated, packed, lengths on the device.

Tokens and channels stand in fragments of 16 by 16 in the order in which tensor cores take them (`kv_layout`), 16-bit
states as well as codes. A stored value is code + 2^(bits-1). Words of 16 bits hold one token's channels of several
neighbouring fragments: 4 of 4 bits, 2 of 8. 6-bit codes are a plane of their low 4 bits and one of their high 2
bits, in bytes, as weights have them (`diffquant.kernels.linear.repack`). The newest tokens stand unquantized in a
ring: token t in slot t modulo its length.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import count

import torch
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.kernels.linear.repack import FRAGMENT
from diffquant.numbers.absmax import dequantize
from diffquant.recipe import Recipe
from diffquant.scheme import Scheme

STATE_TYPES = (torch.float16, torch.bfloat16, torch.float32)
# Tokens of a block that are packed together, also where each has its own scale.
TOKENS_A_STEP = FRAGMENT
# Tokens by which capacities grow: a whole step of every kernel.
CAPACITY_STEP = 128
# Widths of keys and values that `decode` reads, and of the turned channels and latents that `decode_latent` does.
WIDTHS = ((64, 64), (64, 128), (128, 128), (128, 256))
LATENT_WIDTHS = ((64, 512),)
_STAMPS = count()
_UNSERVED = {
    "static": "calibrated scales; the kernels compute theirs",
    "group": "scales per group of channels; the kernels take one a token (row) or, for k, c64",
}


@dataclass
class StoredSide:
    """Stored keys or values of one layer: C tokens of capacity, H heads, w channels.

    Attributes:
        scheme: bits of the codes and what shares a scale.
        residual: number of newest tokens that stay unquantized.
        transposed: whether a fragment's rows are channels, as those of values are; those of keys are tokens.
        codes: codes, int16 [B, H, C/16, w/(16 fields), 256], or the states themselves at 16 bits, with one field.
        top: high 2 bits of 6-bit codes, int16 [B, H, C/16, w/64, 128], a byte a word of `codes`; empty otherwise.
        scales: scales in the states' dtype, [B, H, C] per token, [B, H, C / block, w] per channel; empty at 16 bits.
        recent: states not yet quantized, [B, H, ring/16, w/16, 256]; empty at 16 bits and where nothing waits.
    """

    scheme: Scheme
    residual: int
    transposed: bool
    codes: Tensor
    top: Tensor
    scales: Tensor
    recent: Tensor

    @classmethod
    def empty(cls, scheme: Scheme, residual: int, transposed: bool, like: Tensor, capacity: int) -> "StoredSide":
        """Empty storage for `capacity` tokens of states as `like` [B, H, T, w]."""
        batch, heads, _, width = like.shape
        block = scheme.sharing.tokens
        ring = ring_length(scheme, residual)

        def room(*shape: int, dtype: torch.dtype = like.dtype) -> Tensor:
            # Zeros, since what lies behind the newest token is read, though never weighed.
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
        """Tensors in the order that kernels take them: codes, top, scales and recent."""
        return [self.codes, self.top, self.scales, self.recent]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the states."""
        return self.recent.dtype

    @property
    def width(self) -> int:
        return self.codes.shape[3] * FRAGMENT * channels_in_word(self.scheme.bits)

    @property
    def block(self) -> int:
        """Number of tokens that share the scales of their channels; 1 where each token has its own."""
        return self.scheme.sharing.tokens

    @property
    def ring(self) -> int:
        return self.recent.shape[2] * FRAGMENT

    def packed(self, length: int, floor: int) -> int:
        """Number of packed tokens among `length`; `floor` were packed when the newest tokens were last forgotten."""
        if not self.scheme.quantizes:
            return length
        return max(floor, (length - self.residual) // self.block * self.block)

    def read(self, length: int, floor: int) -> Tensor:
        """States [B, H, length, w] as they read back, in the dtype they came in."""
        packed = self.packed(length, floor)
        if not self.scheme.quantizes:
            return self._in_order(self.codes[..., None], length)
        codes = self._unpacked(packed)
        if self.block == 1:
            old = dequantize(codes, self.scales[:, :, :packed, None])
        else:
            blocks = self.scales[:, :, : -(-packed // self.block)]
            old = dequantize(codes, blocks.repeat_interleave(self.block, 2)[:, :, :packed])
        if not self.ring:
            return old
        slots = torch.arange(packed, length, device=codes.device) % self.ring
        return torch.cat([old, self._in_order(self.recent[..., None], self.ring).index_select(2, slots)], 2)

    def clear(self, first: int, stop: int) -> None:
        """Zero the 16-bit states of tokens `first` up to `stop`, which are forgotten.

        Decoding reads what lies behind the newest token and weighs it by 0, which NaN would survive. Codes are finite
        whatever they stand for.
        """
        if not self.scheme.quantizes:
            self._clear(self.codes, torch.arange(first, stop, device=self.codes.device))
        elif self.ring:
            slots = torch.arange(max(first, stop - self.ring), stop, device=self.codes.device) % self.ring
            self._clear(self.recent, slots)

    def _clear(self, states: Tensor, tokens: Tensor) -> None:
        """Zero tokens of 16-bit states, stored in fragments."""
        at = tokens % FRAGMENT
        # (row of 8, column pair of 4, column half, row half, column of a pair), of which a token is a row or a column.
        parts = states.unflatten(4, (8, 4, 2, 2, 2))
        if self.transposed:
            parts[:, :, tokens // FRAGMENT, :, :, at // 2 % 4, at // 8, :, at % 2] = 0
        else:
            parts[:, :, tokens // FRAGMENT, :, at % 8, :, :, at // 8] = 0

    def _unpacked(self, tokens: int) -> Tensor:
        """Codes of the first tokens, int8 [B, H, tokens, w]."""
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
        """The first tokens [B, H, tokens, w] of fragments' fields [B, H, blocks, chunks, 256, fields]."""
        # (block, chunk, row of 8, column pair of 4, column half, row half, column of a pair, field)
        parts = fields.unflatten(4, (8, 4, 2, 2, 2))
        row, column = (7, 4), (6, 5, 8)
        tokens_at, channels_at = (column, row) if self.transposed else (row, column)
        ordered: Tensor = parts.permute(0, 1, 2, *tokens_at, 3, 9, *channels_at)
        return ordered.flatten(2, 2 + len(tokens_at)).flatten(3)[:, :, :tokens]


class KVStore:
    """Keys and values of one layer.

    Attributes:
        keys, values: storage of each.
        length: number of tokens stored, counted by the host. A replayed CUDA graph advances only the device's count:
            add here what its replays appended before reading, growing or forgetting.
        progress: counts on the device, int32 [4]: tokens stored; packed keys and values when tokens were last
            forgotten; programs of an append that are done.
        stamp: number that changes whenever the storage moves, which no store had before; CUDA graphs hold addresses.
    """

    def __init__(self, recipe: Recipe, k: Tensor, v: Tensor, capacity: int) -> None:
        """An empty store for states as k [B, H, T, d] and v [B, h_kv, T, dv]; T does not matter.

        Raises:
            UsageError: the kernels cannot store such keys and values.
        """
        reason = store_refusal(recipe, k.shape[-1], v.shape[-1], k.dtype, WIDTHS + LATENT_WIDTHS)
        if reason:
            raise UsageError(f"KV store: {reason}")
        capacity = _rounded_up(capacity)
        self.keys = StoredSide.empty(recipe.k, recipe.residual, False, k, capacity)
        self.values = StoredSide.empty(recipe.v, recipe.residual, True, v, capacity)
        self.length = 0
        self.stamp = next(_STAMPS)
        self.progress = torch.zeros(4, dtype=torch.int32, device=k.device)
        self._floors = (0, 0)

    @property
    def capacity(self) -> int:
        return self.keys.codes.shape[2] * FRAGMENT

    @property
    def nbytes(self) -> int:
        """Bytes of the storages behind the tensors."""
        tensors = [self.progress, *self.keys.tensors, *self.values.tensors]
        return sum(x.untyped_storage().nbytes() for x in tensors)

    def read(self) -> tuple[Tensor, Tensor]:
        """All keys and values as attention sees them, [B, H, length, d] and [B, h_kv, length, dv]."""
        k, v = (side.read(self.length, floor) for side, floor in self._sides())
        return k, v

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` tokens."""
        capacity = _rounded_up(capacity)
        self.stamp = next(_STAMPS)
        for side, _ in self._sides():
            for name, tokens in (("codes", FRAGMENT), ("top", FRAGMENT), ("scales", side.block)):
                old = getattr(side, name)
                if old.shape[2]:
                    new = old.new_zeros(*old.shape[:2], capacity // tokens, *old.shape[3:])
                    new[:, :, : old.shape[2]] = old
                    setattr(side, name, new)

    def crop(self, tokens: int) -> None:
        """Forget the newest `tokens` tokens.

        Raises:
            UsageError: forgetting them would split a packed block whose tokens share scales.
        """
        length = max(self.length - tokens, 0)
        floors = [min(side.packed(self.length, floor), length) for side, floor in self._sides()]
        if floors[0] % self.keys.block:
            raise UsageError(
                f"cannot forget {tokens} of {self.length} tokens: token {length} lies within a packed block of "
                f"{self.keys.block} that share scales; keep a residual as long as what may be forgotten"
            )
        for side in (self.keys, self.values):
            side.clear(length, self.length)
        self.length, self._floors = length, (floors[0], floors[1])
        self.progress.copy_(torch.tensor([length, *floors, 0], dtype=torch.int32))

    def replace_tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every stored tensor, all of which have the batch first."""
        self.stamp = next(_STAMPS)
        for side, _ in self._sides():
            for field in fields(side):
                value = getattr(side, field.name)
                if isinstance(value, Tensor):
                    setattr(side, field.name, change(value))

    def _sides(self) -> list[tuple[StoredSide, int]]:
        return list(zip((self.keys, self.values), self._floors, strict=True))


def channels_in_word(bits: int) -> int:
    """Number of a token's channels that share one word: fields of `repack`, or a state."""
    return {16: 1, 8: 2}.get(bits, 4)


def ring_length(scheme: Scheme, residual: int) -> int:
    """Number of slots for the tokens that may wait unquantized: whole steps, so that a step never wraps around."""
    waiting = residual + scheme.sharing.tokens - 1
    step = max(scheme.sharing.tokens, TOKENS_A_STEP)
    return -(-waiting // step) * step if scheme.quantizes else 0


def store_refusal(
    recipe: Recipe,
    width: int,
    value_width: int,
    dtype: torch.dtype,
    widths: Sequence[tuple[int, int]] = WIDTHS,
) -> str | None:
    """Reason why a `KVStore` cannot hold keys and values of these widths, or None; float32 is for the interpreter."""
    if dtype not in STATE_TYPES:
        return f"keys and values are {dtype}; the kernels take {', '.join(map(str, STATE_TYPES))}"
    if (width, value_width) not in widths:
        known = ", ".join(f"{wide} and {values}" for wide, values in widths)
        return f"keys are {width} and values {value_width} wide; the kernels take {known}"
    for name, scheme in (("k", recipe.k), ("v", recipe.v)):
        if scheme.format.integer_refusal:
            return f"{name} is {scheme}; the kernels unpack integers of 4, 6 and 8 bits, and take 16"
        if scheme.bits not in (4, 6, 8, 16):
            return f"{name} has {scheme.bits} bits; the kernels unpack 4, 6 and 8, and take 16"
        if scheme.granularity in _UNSERVED:
            return f"{name} has {_UNSERVED[scheme.granularity]}"
        if scheme.sharing.counts_tokens and scheme.size not in (16, 32, 64, 128):
            return f"{name} has blocks of {scheme.size} tokens; the kernels take c16, c32, c64 and c128"
    return None


def _rounded_up(capacity: int) -> int:
    """Capacity in whole steps of every kernel, which then need not look where the tensors end."""
    return max(-(-capacity // CAPACITY_STEP), 1) * CAPACITY_STEP
