"""The attention mask: which keys each query sees."""

from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Mask:
    """Causal order, padding and window of attention, without a T x S matrix unless the caller passes one.

    Queries are the last T of the S positions, and each sees the keys up to its position. A padding query sees no key,
    so it does not affect quantization scales.

    Attributes:
        keys: validity of positions, bool [B, S], False at padding, or None if there is no padding.
        window: number of newest keys that a query sees, including its own and not counting padding, or None if there
            is no window.
        explicit: mask per query, bool [B or 1, 1, T, S], True where a query sees a key. It replaces causal order,
            padding and window.
    """

    keys: Tensor | None = None
    window: int | None = None
    explicit: Tensor | None = None

    @property
    def valid_ranges(self) -> tuple[Tensor, Tensor] | None:
        """First valid position of each sequence and one past its last valid position, int32 [B] each, or None.

        None means that there is no padding, or that some sequence's valid positions are not contiguous. The result is
        cached, since computing it synchronizes with the device.
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

    @property
    def is_unpadded(self) -> bool:
        """Whether there is no padding and no mask per query; causal order and a window may still apply."""
        return self.keys is None and self.explicit is None

    def is_window_effective(self, keys: int) -> bool:
        """Return whether the window is shorter than S = `keys`, so that some queries may not see all earlier keys."""
        return self.window is not None and self.window < keys

    def visible_end(self, queries: slice, length: int, keys: int) -> int:
        """Return how many of the first keys a range of queries may see; at least 1.

        Args:
            queries: slice of the T queries; start and stop are given.
            length: T, number of all queries.
            keys: S, number of all keys.
        """
        return keys if self.explicit is not None else max(queries.stop + keys - length, 1)

    def dense_rows(self, queries: slice, length: int, keys: int, device: torch.device) -> Tensor | None:
        """Return the dense mask of a range of queries.

        Args:
            queries: slice of the T queries; start and stop are given.
            length: T, number of all queries.
            keys: S, number of keys.
            device: device of the result.

        Returns:
            bool [B or 1, 1, queries in the range, S], True where a query sees a key, or None if all is visible.
        """
        if self.explicit is not None:
            return self.explicit[:, :, queries]
        seen = None
        if length > 1:
            position = (torch.arange(queries.start, queries.stop, device=device) + (keys - length))[:, None]
            seen = (torch.arange(keys, device=device) <= position)[None, None]
        if self.keys is not None:
            valid = self.keys[:, None, None, :]
            seen = valid.expand(-1, 1, queries.stop - queries.start, -1) if seen is None else seen & valid
            seen = seen & cast(Tensor, self.valid_queries(length))[:, None, queries, None]
        if self.is_window_effective(keys):
            near = self._within_window(queries, length, keys, device)
            seen = near if seen is None else seen & near
        return seen

    def dense(self, length: int, keys: int, device: torch.device) -> Tensor | None:
        """Return the dense mask of all T = `length` queries over S = `keys` keys.

        Returns:
            bool [B or 1, 1, T, S], True where a query sees a key, or None if all is visible.
        """
        return self.dense_rows(slice(0, length), length, keys, device)

    def valid_queries(self, length: int) -> Tensor | None:
        """Return which of the last `length` positions are not padding, bool [B or 1, length], or None if all are."""
        if self.explicit is not None:
            return self.explicit.any(-1)[:, 0]
        if self.keys is None:
            return None
        # With more queries than keys, the first queries have no position and count as padding.
        return pad(self.keys, (max(length - self.keys.shape[1], 0), 0))[:, -length:]

    @property
    def valid_keys(self) -> Tensor | None:
        """Valid keys, bool [B or 1, S], or None if all are; with `explicit`, the keys that some query sees."""
        return self.keys if self.explicit is None else self.explicit.any(-2)[:, 0]

    def count_needed_keys(self, keys: int) -> int:
        """Return how many of the newest of S = `keys` positions later queries may see: all S without a window."""
        if self.window is None:
            return keys
        if self.keys is None:
            return min(keys, self.window - 1)
        # Each sequence keeps its newest window - 1 valid positions; the batch keeps as many as the longest such span.
        newest = self.keys & (self._places > self._places[:, -1:] - (self.window - 1))
        spans = torch.where(newest.any(1), keys - newest.int().argmax(1), 0)
        return int(spans.max())

    @property
    def _places(self) -> Tensor:
        """Index of each position among the valid ones, counted from 1, int64 [B, S]."""
        return cast(Tensor, self.keys).cumsum(1)

    def _within_window(self, queries: slice, length: int, keys: int, device: torch.device) -> Tensor:
        """Return which keys lie in each query's window, bool [B or 1, 1, queries in the range, S]."""
        places = torch.arange(keys, device=device)[None] if self.keys is None else self._places
        of_queries = pad(places, (max(length - keys, 0), 0))[:, -length:][:, queries]
        return (of_queries[:, :, None] - places[:, None, :] < cast(int, self.window))[:, None]
