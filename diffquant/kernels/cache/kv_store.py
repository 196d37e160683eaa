"""Storage of one layer's KV cache for the kernels: preallocated, packed, with lengths on the device.

Keys and values are each a `StoredKeysOrValues`, which describes the layout. The newest tokens are unquantized in a ring
buffer: token t is in slot t modulo the ring's length.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import count

import torch
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.kernels.cache.stored_side import StoredKeysOrValues
from diffquant.kernels.linear.repack import FRAGMENT
from diffquant.recipe import Recipe

STATE_TYPES = (torch.float16, torch.bfloat16, torch.float32)
# Capacities are multiples of this number of tokens, a whole step of every kernel.
CAPACITY_STEP = 128
# Widths of keys and values supported by `decode`, and of rotated key channels and latents supported by `decode_latent`.
WIDTHS = ((64, 64), (64, 128), (128, 128), (128, 256))
LATENT_WIDTHS = ((64, 512),)
_VERSIONS = count()
_UNSERVED = {
    "static": "calibrated scales, which the kernels do not support",
    "group": "scales per group of channels; the kernels support one per token (row) or, for k, c64",
}


class KVStore:
    """Stored keys and values of one layer.

    Attributes:
        keys, values: storage of keys and of values.
        length: number of stored tokens, counted on the host. Replays of a CUDA graph advance only the device's count,
            so add the tokens they appended here before reading, growing or forgetting.
        progress: counters on the device, int32 [4]: stored tokens; packed keys and packed values when tokens were last
            forgotten; finished programs of an append.
        storage_version: globally unique number that changes whenever the memory moves, to detect stale CUDA graphs.
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
        self.storage_version = next(_VERSIONS)
        self.progress = torch.zeros(4, dtype=torch.int32, device=k.device)
        self._floors = (0, 0)

    def has_same_layout(self, recipe: Recipe, k: Tensor, v: Tensor, capacity: int) -> bool:
        """Return whether a new store with these arguments would have the same shapes, dtypes and device as this one."""
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
        """Move the tokens to new memory for at least `capacity` tokens."""
        capacity = _round_up(capacity)
        self.storage_version = next(_VERSIONS)
        for side, _ in self._sides():
            for name, tokens in (("codes", FRAGMENT), ("top", FRAGMENT), ("scales", side.tokens_per_scale)):
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
        if floors[0] % self.keys.tokens_per_scale:
            raise UsageError(
                f"cannot forget {tokens} of {self.length} tokens: token {length} lies within a packed block of "
                f"{self.keys.tokens_per_scale} that share scales; set a residual of at least as many tokens as may be "
                f"forgotten"
            )
        for side in (self.keys, self.values):
            side.clear(length, self.length)
        self.length, self._floors = length, (floors[0], floors[1])
        self.progress.copy_(torch.tensor([length, *floors, 0], dtype=torch.int32))

    def replace_tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace each stored tensor, whose first axis is the batch, by the result of a function."""
        self.storage_version = next(_VERSIONS)
        for side, _ in self._sides():
            for field in fields(side):
                value = getattr(side, field.name)
                if isinstance(value, Tensor):
                    setattr(side, field.name, change(value))

    def _sides(self) -> list[tuple[StoredKeysOrValues, int]]:
        return list(zip((self.keys, self.values), self._floors, strict=True))


def store_refusal(
    recipe: Recipe,
    width: int,
    value_width: int,
    dtype: torch.dtype,
    widths: Sequence[tuple[int, int]] = WIDTHS,
) -> str | None:
    """Return why a `KVStore` cannot hold keys and values with these widths and dtype under a recipe, or None.

    Args:
        recipe: recipe of the layer.
        width, value_width: channels of a key and of a value.
        dtype: dtype of both; float32 is for Triton's interpreter.
        widths: supported combinations of `width` and `value_width`.
    """
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
        if scheme.sharing.has_token_groups and scheme.granularity_size not in (16, 32, 64, 128):
            return f"{name} has blocks of {scheme.granularity_size} tokens; the kernels support c16, c32, c64 and c128"
    return None


def _round_up(capacity: int) -> int:
    """Round a capacity up to whole steps of every kernel, so that kernels need no bounds checks."""
    return max(-(-capacity // CAPACITY_STEP), 1) * CAPACITY_STEP
