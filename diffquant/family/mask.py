"""The mask of an attention: which keys each query sees."""

from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Mask:
    """Causal order, padding and window of an attention, without a T x S matrix unless the caller passes one.

    Queries are the last T of the S positions and see keys up to their own. A query that is padding sees nothing, so
    that it affects no scale.

    Attributes:
        keys: validity of positions, bool [B, S], False at padding; None if there is no padding.
        window: number of newest keys that a query sees, its own included, padding not counted; None without a window.
        seen: keys that each query sees, bool [B or 1, 1, T, S], which replaces causal order, padding and window.
    """

    keys: Tensor | None = None
    window: int | None = None
    seen: Tensor | None = None

    @property
    def ranges(self) -> tuple[Tensor, Tensor] | None:
        """First valid position and one past the last, int32 [B] each; None if there is no padding, or it has holes.

        Computed once per mask, since the answer has to be fetched from the device.
        """
        # Without padding nothing is cached: a cached property takes a lock, which torch.compile cannot trace.
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
        """Whether some of these S keys may lie outside the window."""
        return self.window is not None and self.window < keys

    def reach(self, queries: slice, length: int, keys: int) -> int:
        """How many of S keys a range of T queries may see, from the first on, at least one: later ones are hidden."""
        return keys if self.seen is not None else max(queries.stop + keys - length, 1)

    def visible(self, queries: slice, length: int, keys: int, device: torch.device) -> Tensor | None:
        """Which keys a range of the queries sees.

        Args:
            queries: range of the T queries, with start and stop.
            length: T, all queries.
            keys: S.
            device: device of the result.

        Returns:
            bool [B or 1, 1, queries in the range, S], or None if everything is visible.
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
        """Which keys each of the T queries sees, in the form of `visible`."""
        return self.visible(slice(0, length), length, keys, device)

    def valid_queries(self, length: int) -> Tensor | None:
        """Validity of the last `length` positions, bool [B or 1, length], or None if there is no padding."""
        if self.seen is not None:
            return self.seen.any(-1)[:, 0]
        if self.keys is None:
            return None
        # With more queries than keys, the first queries have no position and count as padding.
        return pad(self.keys, (max(length - self.keys.shape[1], 0), 0))[:, -length:]

    @property
    def valid_keys(self) -> Tensor | None:
        """Validity of keys, bool [B or 1, S]: those that any query sees if `seen` is given, else `keys`."""
        return self.keys if self.seen is None else self.seen.any(-2)[:, 0]

    def needed_keys(self, keys: int) -> int:
        """How many of the last positions a later query may still see; all of them without a window."""
        if self.window is None:
            return keys
        if self.keys is None:
            return min(keys, self.window - 1)
        # Each sequence needs its newest window - 1 positions that are not padding: count from the first of them.
        newest = self.keys & (self._places > self._places[:, -1:] - (self.window - 1))
        spans = torch.where(newest.any(1), keys - newest.int().argmax(1), 0)
        return int(spans.max())

    @property
    def _places(self) -> Tensor:
        """Each position's index among those that are not padding, counted from 1, int64 [B, S]."""
        return cast(Tensor, self.keys).cumsum(1)

    def _within_window(self, queries: slice, length: int, keys: int, device: torch.device) -> Tensor:
        """Whether a key lies less than the window before a query, bool [B or 1, 1, queries in the range, S]."""
        places = torch.arange(keys, device=device)[None] if self.keys is None else self._places
        of_queries = pad(places, (max(length - keys, 0), 0))[:, -length:][:, queries]
        return (of_queries[:, :, None] - places[:, None, :] < cast(int, self.window))[:, None]
