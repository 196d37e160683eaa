"""Which keys a query sees."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from diffquant.errors import UsageError


@dataclass(frozen=True)
class Mask:
    """Causal order and padding, without a T x S matrix.

    Attributes:
        causal: a query sees keys up to its own position. Queries are the last T of the S positions.
        keys: [B, S] bool, False where a position is padding; None where there is none. A query that is
            padding itself sees nothing, so that it enters no scale.
        window: with `causal`, how many keys a query sees at most, its own included; None for all.
    """

    causal: bool = True
    keys: Tensor | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and (self.window < 1 or not self.causal):
            raise UsageError(f"a sliding window needs causal order and at least 1 key, got {self.window}")

    @cached_property
    def ranges(self) -> tuple[Tensor, Tensor] | None:
        """Each sequence's first valid position and one past its last, int32 [B]; None without padding, or with holes.

        Looked up once a mask, since the answer has to come from the device.
        """
        if self.keys is None:
            return None
        keys = self.keys.shape[1]
        starts = self.keys.int().argmax(1)
        ends = starts + self.keys.sum(1)
        position = torch.arange(keys, device=self.keys.device)
        whole = (position >= starts[:, None]) & (position < ends[:, None])
        return (starts.int(), ends.int()) if torch.equal(whole, self.keys) else None

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
        if self.causal and (length > 1 or self.window is not None):
            position = (torch.arange(queries.start, queries.stop, device=device) + (keys - length))[:, None]
            key = torch.arange(keys, device=device)
            order = key <= position if self.window is None else (key <= position) & (key > position - self.window)
            seen = order[None, None]
        if self.keys is not None:
            valid = self.keys[:, None, None, :]
            seen = valid.expand(-1, 1, queries.stop - queries.start, -1) if seen is None else seen & valid
            if self.causal:
                # More queries than keys: the first ones have no position, which is as padding.
                own = pad(self.keys, (max(length - keys, 0), 0))[:, -length:]
                seen = seen & own[:, None, queries, None]
        return seen

    def dense(self, length: int, keys: int, device: torch.device) -> Tensor | None:
        """`visible` for all T queries."""
        return self.visible(slice(0, length), length, keys, device)
