"""Which keys a query sees."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mask:
    """Causal order and padding, without a T x S matrix.

    Attributes:
        causal: a query sees keys up to its own position. Queries are the last T of the S positions.
        keys: [B, S] bool, False where a position is padding; None where there is none. A query that is
            padding itself sees nothing, so that it enters no scale.
    """

    causal: bool = True
    keys: Tensor | None = None

    def visible(self, queries: slice, length: int, keys: int, device: torch.device) -> Tensor | None:
        """What a range of the queries sees.

        Args:
            queries: which of the T queries, with start and stop.
            length: T.
            keys: S.

        Returns:
            bool [B or 1, 1, rows, S], or None where all is visible.
        """
        seen = None
        if self.causal and length > 1:
            position = torch.arange(queries.start, queries.stop, device=device) + (keys - length)
            seen = (torch.arange(keys, device=device) <= position[:, None])[None, None]
        if self.keys is not None:
            valid = self.keys[:, None, None, :]
            seen = valid.expand(-1, 1, queries.stop - queries.start, -1) if seen is None else seen & valid
            if self.causal:
                before = keys - length
                seen = seen & self.keys[:, None, before + queries.start : before + queries.stop, None]
        return seen

    def dense(self, length: int, keys: int, device: torch.device) -> Tensor | None:
        """`visible` for all T queries."""
        return self.visible(slice(0, length), length, keys, device)
