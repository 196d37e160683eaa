"""The mask of an attention: which keys each query sees."""

from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Mask:
    """Causal order and padding of an attention, without a T x S matrix.

    A query sees keys up to its own position; queries are the last T of the S positions. A query that is padding
    itself sees nothing, so that it enters no scale.

    Attributes:
        keys: validity of positions, bool [B, S], False where one is padding; None without padding.
    """

    keys: Tensor | None = None

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
        seen = None
        if length > 1:
            position = (torch.arange(queries.start, queries.stop, device=device) + (keys - length))[:, None]
            seen = (torch.arange(keys, device=device) <= position)[None, None]
        if self.keys is not None:
            valid = self.keys[:, None, None, :]
            seen = valid.expand(-1, 1, queries.stop - queries.start, -1) if seen is None else seen & valid
            # More queries than keys: the first ones have no position, which is as padding.
            valid_queries = pad(self.keys, (max(length - keys, 0), 0))[:, -length:]
            seen = seen & valid_queries[:, None, queries, None]
        return seen

    def dense(self, length: int, keys: int, device: torch.device) -> Tensor | None:
        """Which keys each of the T queries sees, as `visible` gives it."""
        return self.visible(slice(0, length), length, keys, device)
