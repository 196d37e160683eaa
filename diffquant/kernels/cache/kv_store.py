"""Storage of one layer's KV cache as the kernels want it: preallocated, packed, lengths on the device.

A stored value is code + 2^(bits-1) and unpacks without interleaving. Of a head w wide, 8 bits take a byte a
channel; at 4 bits byte j holds channel j in its low nibble and channel j + w/2 in its high one; at 6 bits
such nibbles are the low four bits, and byte j of a second plane the top two of channels j, j + w/4, j + w/2
and j + 3w/4, from its low bits up. The newest tokens stand unquantized in a ring: token t in slot t modulo
its length.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import count

import torch
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.numerics import dequantize
from diffquant.recipe import Recipe
from diffquant.scheme import Scheme

STATE_TYPES = (torch.float16, torch.bfloat16, torch.float32)
# Tokens of a block that are packed together, also where each has its own scale.
TOKENS_A_STEP = 16
_CAPACITY_STEP = 128
_STAMPS = count()


@dataclass
class StoredSide:
    """Stored keys or values of one layer: C tokens of capacity, H heads, w channels.

    Attributes:
        scheme: bits of the codes and what shares a scale.
        residual: number of newest tokens that stay unquantized.
        codes: codes, uint8 [B, H, C, bytes of a token], or the states themselves at 16 bits.
        top: second plane of 6 bits, uint8 [B, H, C, w/4]; empty otherwise.
        scales: scales in the states' dtype, [B, H, C] per token, [B, H, C / block, w] per channel; empty at 16 bits.
        recent: states not yet quantized, [B, H, ring, w]; empty at 16 bits and where nothing waits.
    """

    scheme: Scheme
    residual: int
    codes: Tensor
    top: Tensor
    scales: Tensor
    recent: Tensor

    @classmethod
    def empty(cls, scheme: Scheme, residual: int, like: Tensor, capacity: int) -> "StoredSide":
        """Empty storage for `capacity` tokens of states as `like` [B, H, T, w]."""
        batch, heads, _, width = like.shape
        bits = scheme.bits
        block = tokens_a_scale(scheme)
        ring = ring_length(scheme, residual)

        def room(*shape: int, dtype: torch.dtype = like.dtype) -> Tensor:
            # Zeros, since what lies behind the newest token is read, though never weighed.
            return torch.zeros(batch, heads, *shape, dtype=dtype, device=like.device)

        if not scheme.quantizes:
            return cls(scheme, 0, room(capacity, width), room(0, dtype=torch.uint8), room(0), room(0))
        return cls(
            scheme,
            residual,
            codes=room(capacity, width if bits == 8 else width // 2, dtype=torch.uint8),
            top=room(capacity, width // 4, dtype=torch.uint8) if bits == 6 else room(0, dtype=torch.uint8),
            scales=room(capacity) if block == 1 else room(capacity // block, width),
            recent=room(ring, width),
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
        return self.codes.shape[-1] * (1 if self.scheme.bits in (8, 16) else 2)

    @property
    def block(self) -> int:
        """Number of tokens that share the scales of their channels; 1 where each token has its own."""
        return tokens_a_scale(self.scheme)

    @property
    def ring(self) -> int:
        return self.recent.shape[2]

    def packed(self, length: int, floor: int) -> int:
        """Number of packed tokens among `length`; `floor` were packed when the newest tokens were last forgotten."""
        if not self.scheme.quantizes:
            return length
        return max(floor, (length - self.residual) // self.block * self.block)

    def read(self, length: int, floor: int) -> Tensor:
        """States [B, H, length, w] as they read back, in the dtype they came in."""
        packed = self.packed(length, floor)
        if not self.scheme.quantizes:
            return self.codes[:, :, :length]
        codes = self._unpacked(packed)
        if self.block == 1:
            old = dequantize(codes, self.scales[:, :, :packed, None])
        else:
            blocks = self.scales[:, :, : -(-packed // self.block)]
            old = dequantize(codes, blocks.repeat_interleave(self.block, 2)[:, :, :packed])
        if not self.ring:
            return old
        slots = torch.arange(packed, length, device=codes.device) % self.ring
        return torch.cat([old, self.recent.index_select(2, slots)], 2)

    def clear(self, first: int, stop: int) -> None:
        """Zero the 16-bit states of tokens `first` up to `stop`, which are forgotten.

        Decoding reads what lies behind the newest token and weighs it by 0, which NaN would survive. Codes are finite
        whatever they stand for.
        """
        if not self.scheme.quantizes:
            self.codes[:, :, first:stop] = 0
        elif self.ring:
            slots = torch.arange(max(first, stop - self.ring), stop, device=self.codes.device) % self.ring
            self.recent[:, :, slots] = 0

    def _unpacked(self, tokens: int) -> Tensor:
        """Codes of the first tokens, int8 [B, H, tokens, w]."""
        stored, bits = self.codes[:, :, :tokens], self.scheme.bits
        if bits != 8:
            stored = torch.cat([stored & 15, stored >> 4], -1)
        if bits == 6:
            top = self.top[:, :, :tokens]
            stored = stored | torch.cat([(top >> shift & 3) << 4 for shift in (0, 2, 4, 6)], -1)
        return (stored - (1 << (bits - 1))).view(torch.int8)


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
        reason = store_refusal(recipe, k.shape[-1], v.shape[-1], k.dtype)
        if reason:
            raise UsageError(f"KV store: {reason}")
        capacity = _rounded_up(capacity)
        self.keys = StoredSide.empty(recipe.k, recipe.residual, k, capacity)
        self.values = StoredSide.empty(recipe.v, recipe.residual, v, capacity)
        self.length = 0
        self.stamp = next(_STAMPS)
        self.progress = torch.zeros(4, dtype=torch.int32, device=k.device)
        self._floors = (0, 0)

    @property
    def capacity(self) -> int:
        return self.keys.codes.shape[2]

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
            for name, tokens in (("codes", 1), ("top", 1), ("scales", side.block)):
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


def tokens_a_scale(scheme: Scheme) -> int:
    """Number of tokens that share the scales of their channels; 1 where each token has its own."""
    return scheme.size or 1 if scheme.granularity == "column" else 1


def ring_length(scheme: Scheme, residual: int) -> int:
    """Number of slots for the tokens that may wait unquantized: whole steps, so that a step never wraps around."""
    waiting = residual + tokens_a_scale(scheme) - 1
    step = max(tokens_a_scale(scheme), TOKENS_A_STEP)
    return -(-waiting // step) * step if scheme.quantizes else 0


def store_refusal(recipe: Recipe, width: int, value_width: int, dtype: torch.dtype) -> str | None:
    """Reason why a `KVStore` cannot hold keys and values of these widths, or None; float32 is for the interpreter."""
    if dtype not in STATE_TYPES:
        return f"keys and values are {dtype}; the kernels take {', '.join(map(str, STATE_TYPES))}"
    if width not in (64, 128) or value_width not in (width, 2 * width):
        return (
            f"keys are {width} and values {value_width} wide; keys must be 64 or 128, values as wide or twice as wide"
        )
    for name, scheme in (("k", recipe.k), ("v", recipe.v)):
        if scheme.bits not in (4, 6, 8, 16):
            return f"{name} has {scheme.bits} bits; the kernels unpack 4, 6 and 8, and take 16"
        if scheme.granularity == "static":
            return f"{name} has calibrated scales; the kernels compute theirs"
        if scheme.granularity == "group":
            return f"{name} has scales per group of channels; the kernels take one a token (row) or, for k, c64"
        if scheme.granularity == "column" and scheme.size not in (16, 32, 64, 128):
            return f"{name} has blocks of {scheme.size} tokens; the kernels take c16, c32, c64 and c128"
    return None


def _rounded_up(capacity: int) -> int:
    """Capacity in whole steps of every kernel, which then need not look where the tensors end."""
    return max(-(-capacity // _CAPACITY_STEP), 1) * _CAPACITY_STEP
