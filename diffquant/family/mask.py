"""The mask of an attention: which keys each query sees."""

from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Mask:
    """Causal order, padding and window of an attention, without a T x S matrix unless the caller has one.

    A query sees keys up to its own position; queries are the last T of the S positions. A query that is padding
    itself sees nothing, so that it enters no scale.

    Attributes:
        keys: validity of positions, bool [B, S], False where one is padding; None without padding.
        window: number of newest keys that a query sees, its own included; padding does not count. None for all.
        seen: keys that each query sees, bool [B or 1, 1, T, S], in place of causal order, padding and window; None
            where these say it.
    """

    keys: Tensor | None = None
    window: int | None = None
    seen: Tensor | None = None

    @property
    def ranges(self) -> tuple[Tensor, Tensor] | None:
        """Each sequence's first valid position and one past its last, int32 [B]; None without padding, or with holes.

        Looked up once a mask, since the answer has to come from the device.
        """
        # Without padding nothing is cached: a cached property takes a lock, which torch.compile may not trace.
        return None if self.keys is None else self._padded_ranges

    @cached_property
    def _padded_ranges(self) -> tuple[Tensor, Tensor] | None:
        keys = cast(Tensor, self.keys)
        starts = keys.int().argmax(1)
        ends = starts + keys.sum(1)
        position = torch.arange(keys.shape[1], device=keys.device)
        unbroken = (position >= starts[:, None]) & (position < ends[:, None])
        return (starts.int(), ends.int()) if torch.equal(unbroken, keys) else None

    def hides_by_window(self, keys: int) -> bool:
        """Whether some of so many keys may lie behind the window."""
        return self.window is not None and self.window < keys

    def visible(self, queries: slice, length: int, keys: int, device: torch.device) -> Tensor | None:
        """Which keys a range of the queries sees.

        Args:
            queries: range of the T queries, with start and stop.
            length: T, all queries.
            keys: S.
            device: device of the result.

        Returns:
            bool [B or 1, 1, queries in the range, S], or None where all is visible.
        """
        if self.seen is not None:
            return self.seen[:, :, queries]
        seen = None
        if length > 1:
            position = (torch.arange(queries.start, queries.stop, device=device) + (keys - length))[:, None]
            seen = (torch.arange(keys, device=device) <= position)[None, None]
        if self.keys is not None:
            valid = self.keys[:, None, None, :]
            seen = valid.expand(-1, 1, queries.stop - queries.start, -1) if seen is None else seen & valid
            seen = seen & cast(Tensor, self.valid_queries(length))[:, None, queries, None]
        if self.hides_by_window(keys):
            near = self._within_window(queries, length, keys, device)
            seen = near if seen is None else seen & near
        return seen

    def dense(self, length: int, keys: int, device: torch.device) -> Tensor | None:
        """Which keys each of the T queries sees, as `visible` gives it."""
        return self.visible(slice(0, length), length, keys, device)

    def valid_queries(self, length: int) -> Tensor | None:
        """Validity of the last `length` positions, bool [B or 1, length]; None without padding."""
        if self.seen is not None:
            return self.seen.any(-1)[:, 0]
        if self.keys is None:
            return None
        # More queries than keys: the first ones have no position, which is as padding.
        return pad(self.keys, (max(length - self.keys.shape[1], 0), 0))[:, -length:]

    @property
    def valid_keys(self) -> Tensor | None:
        """Validity of keys, bool [B or 1, S]: of those that a query sees, where the caller says which; else `keys`."""
        return self.keys if self.seen is None else self.seen.any(-2)[:, 0]

    def needed_keys(self, keys: int) -> int:
        """Number of the newest of so many positions that a query after them may still see; all without a window."""
        if self.window is None:
            return keys
        if self.keys is None:
            return min(keys, self.window - 1)
        # Of each sequence the newest window - 1 positions that are no padding: from the first of them on.
        newest = self.keys & (self._places > self._places[:, -1:] - (self.window - 1))
        spans = torch.where(newest.any(1), keys - newest.int().argmax(1), 0)
        return int(spans.max())

    @property
    def _places(self) -> Tensor:
        """Each position's place among those that are no padding, counted from 1, int64 [B, S]."""
        return cast(Tensor, self.keys).cumsum(1)

    def _within_window(self, queries: slice, length: int, keys: int, device: torch.device) -> Tensor:
        """Whether a key lies less than the window before a query, bool [B or 1, 1, queries in the range, S]."""
        places = torch.arange(keys, device=device)[None] if self.keys is None else self._places
        of_queries = pad(places, (max(length - keys, 0), 0))[:, -length:][:, queries]
        return (of_queries[:, :, None] - places[:, None, :] < cast(int, self.window))[:, None]
