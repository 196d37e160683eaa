"""Storage of one layer's KV cache for the kernels: preallocated, packed, with lengths on the device.

Tokens and channels are stored in fragments of 16 by 16 in the register order of tensor cores (`kv_layout`), both codes
and 16-bit values. Stored numbers are code + 2^(bits-1). A 16-bit word contains codes of one token from several adjacent
fragments: 4 codes of 4 bits or 2 of 8. 6-bit codes are stored as words of their low 4 bits and bytes of their high 2
bits, as in weights (`diffquant.kernels.linear.repack`). The newest tokens are unquantized in a ring buffer: token t is
in slot t modulo the ring's length. Below, "states" are keys or values before quantization.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import count

import torch
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.kernels.linear.repack import FRAGMENT
from diffquant.recipe import Recipe
from diffquant.recipe.numbers.absmax import dequantize
from diffquant.recipe.scheme import Scheme

STATE_TYPES = (torch.float16, torch.bfloat16, torch.float32)
# Number of tokens that are packed together, even if each has its own scale.
TOKENS_A_STEP = FRAGMENT
# Capacities are multiples of this number of tokens, a whole step of every kernel.
CAPACITY_STEP = 128
# Widths of keys and values supported by `decode`, and of rotated key channels and latents supported by `decode_latent`.
WIDTHS = ((64, 64), (64, 128), (128, 128), (128, 256))
LATENT_WIDTHS = ((64, 512),)
_STAMPS = count()
_UNSERVED = {
    "static": "calibrated scales, which the kernels do not support",
    "group": "scales per group of channels; the kernels support one per token (row) or, for k, c64",
}


@dataclass
class StoredKeysOrValues:
    """Stored keys or values of one layer, with capacity for C tokens, H heads and w channels.

    Attributes:
        scheme: number format and granularity.
        residual: number of newest tokens that stay unquantized.
        transposed: whether rows of a fragment are channels (values) instead of tokens (keys).
        codes: codes, int16 [B, H, C/16, w/(16 fields), 256], or 16-bit states, with one field.
        top: high 2 bits of 6-bit codes, int16 [B, H, C/16, w/64, 128], one byte per word of `codes`, else empty.
        scales: scales in the states' dtype, [B, H, C] per token, [B, H, C / block, w] per channel; empty at 16 bits.
        recent: ring of unquantized states, [B, H, ring/16, w/16, 256]; empty at 16 bits or if no tokens wait.
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
        """Allocate storage for `capacity` tokens of states with the shape, dtype and device of `like` [B, H, T, w]."""
        batch, heads, _, width = like.shape
        block = scheme.sharing.tokens
        ring = ring_length(scheme, residual)

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
        """Dtype of the states."""
        return self.recent.dtype

    @property
    def width(self) -> int:
        return self.codes.shape[3] * FRAGMENT * channels_in_word(self.scheme.bits)

    @property
    def block(self) -> int:
        """Number of tokens that share per-channel scales; 1 with per-token scales."""
        return self.scheme.sharing.tokens

    @property
    def ring(self) -> int:
        return self.recent.shape[2] * FRAGMENT

    def count_packed(self, length: int, floor: int) -> int:
        """Return how many of `length` tokens are packed; `floor` were packed when tokens were last forgotten."""
        if not self.scheme.quantizes:
            return length
        return max(floor, (length - self.residual) // self.block * self.block)

    def read(self, length: int, floor: int) -> Tensor:
        """Return the dequantized states [B, H, length, w] in their original dtype."""
        packed = self.count_packed(length, floor)
        if not self.scheme.quantizes:
            return self._in_order(self.codes[..., None], length)
        codes = self._unpack(packed)
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
        """Set the 16-bit states of forgotten tokens `first` up to `stop` to 0.

        Kernels multiply memory beyond the newest token by 0, which would not remove NaN. Codes are always finite.
        """
        if not self.scheme.quantizes:
            self._clear(self.codes, torch.arange(first, stop, device=self.codes.device))
        elif self.ring:
            slots = torch.arange(max(first, stop - self.ring), stop, device=self.codes.device) % self.ring
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


class KVStore:
    """Stored keys and values of one layer.

    Attributes:
        keys, values: storage of keys and of values.
        length: number of stored tokens, counted on the host. Replays of a CUDA graph advance only the device's count,
            so add the tokens they appended here before reading, growing or forgetting.
        progress: counters on the device, int32 [4]: stored tokens; packed keys and packed values when tokens were last
            forgotten; finished programs of an append.
        stamp: globally unique number that changes whenever the memory moves, to detect stale CUDA graphs.
    """

    def __init__(self, recipe: Recipe, k: Tensor, v: Tensor, capacity: int) -> None:
        """Create an empty store for keys like k [B, H, T, d] and values like v [B, h_kv, T, dv], for any T.

        Raises:
            UsageError: the kernels cannot store such keys and values.
        """
        reason = store_refusal(recipe, k.shape[-1], v.shape[-1], k.dtype, WIDTHS + LATENT_WIDTHS)
        if reason:
            raise UsageError(f"KV store: {reason}")
        capacity = _round_up(capacity)
        self.keys = StoredKeysOrValues.empty(recipe.k, recipe.residual, False, k, capacity)
        self.values = StoredKeysOrValues.empty(recipe.v, recipe.residual, True, v, capacity)
        self.length = 0
        self.stamp = next(_STAMPS)
        self.progress = torch.zeros(4, dtype=torch.int32, device=k.device)
        self._floors = (0, 0)

    def fits(self, recipe: Recipe, k: Tensor, v: Tensor, capacity: int) -> bool:
        """Return whether a new store with these arguments would have the same shapes, dtypes and device."""
        sides = ((self.keys, recipe.k, k), (self.values, recipe.v, v))
        return self.capacity == _round_up(capacity) and all(
            (side.scheme, side.width, side.dtype, side.codes.device, side.codes.shape[:2])
            == (scheme, x.shape[3], x.dtype, x.device, x.shape[:2])
            and side.residual == (recipe.residual if scheme.quantizes else 0)
            for side, scheme, x in sides
        )

    def clear(self) -> None:
        """Forget all tokens, keeping the memory."""
        for side in (self.keys, self.values):
            for x in side.tensors:
                x.zero_()
        self.length, self._floors = 0, (0, 0)
        self.progress.zero_()

    @property
    def capacity(self) -> int:
        return self.keys.codes.shape[2] * FRAGMENT

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        tensors = [self.progress, *self.keys.tensors, *self.values.tensors]
        return sum(x.untyped_storage().nbytes() for x in tensors)

    def read(self) -> tuple[Tensor, Tensor]:
        """Return all dequantized keys [B, H, length, d] and values [B, h_kv, length, dv]."""
        k, v = (side.read(self.length, floor) for side, floor in self._sides())
        return k, v

    def grow(self, capacity: int) -> None:
        """Reallocate the memory for `capacity` tokens."""
        capacity = _round_up(capacity)
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
            UsageError: a packed block whose tokens share scales would be split.
        """
        length = max(self.length - tokens, 0)
        floors = [min(side.count_packed(self.length, floor), length) for side, floor in self._sides()]
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
        """Replace each stored tensor by the result of a function; the batch is the first axis of each."""
        self.stamp = next(_STAMPS)
        for side, _ in self._sides():
            for field in fields(side):
                value = getattr(side, field.name)
                if isinstance(value, Tensor):
                    setattr(side, field.name, change(value))

    def _sides(self) -> list[tuple[StoredKeysOrValues, int]]:
        return list(zip((self.keys, self.values), self._floors, strict=True))


def channels_in_word(bits: int) -> int:
    """Return the number of channels in a 16-bit word: several codes as in `repack`, or one unquantized value."""
    return {16: 1, 8: 2}.get(bits, 4)


def ring_length(scheme: Scheme, residual: int) -> int:
    """Return the number of slots of the ring of unquantized tokens, in whole steps, so that no step wraps around."""
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
    """Return why a `KVStore` cannot hold such keys and values, or None; float32 is for Triton's interpreter."""
    if dtype not in STATE_TYPES:
        return f"keys and values are {dtype}; the kernels support {', '.join(map(str, STATE_TYPES))}"
    if (width, value_width) not in widths:
        known = ", ".join(f"{wide} and {values}" for wide, values in widths)
        return f"keys are {width} and values {value_width} wide; the kernels support {known}"
    for name, scheme in (("k", recipe.k), ("v", recipe.v)):
        if scheme.format.integer_refusal:
            return f"{name} is {scheme}; the kernels support integers of 4, 6 and 8 bits, and 16 bits"
        if scheme.bits not in (4, 6, 8, 16):
            return f"{name} has {scheme.bits} bits; the kernels support 4, 6, 8 and 16"
        if scheme.granularity in _UNSERVED:
            return f"{name} has {_UNSERVED[scheme.granularity]}"
        if scheme.sharing.has_token_groups and scheme.size not in (16, 32, 64, 128):
            return f"{name} has blocks of {scheme.size} tokens; the kernels support c16, c32, c64 and c128"
    return None


def _round_up(capacity: int) -> int:
    """Round a capacity up to whole steps of every kernel, so that kernels need no bounds checks."""
    return max(-(-capacity // CAPACITY_STEP), 1) * CAPACITY_STEP
