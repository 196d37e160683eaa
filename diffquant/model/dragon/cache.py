"""The cache of Dragon's attention: keys and values as read, and the newest token's as they were projected."""

from collections.abc import Callable

import torch
from torch import Tensor

from diffquant.model.packing import Packing
from diffquant.model.windowed_cache import WindowedLayer


class MixedLayer(WindowedLayer):
    """A layer whose next token's keys and values are mixed with the newest one's, before any norm.

    Attributes:
        newest: keys and values [B, 1, h_kv, d] of each sequence's newest token, and whether it has any [B]; None before
            the first.
    """

    newest: tuple[Tensor, Tensor, Tensor] | None

    def reset(self) -> None:
        super().reset()
        self.newest = None

    @property
    def nbytes(self) -> int:
        newest = self.newest or ()
        return super().nbytes + sum(x.untyped_storage().nbytes() for x in newest)

    def keep_newest(self, k: Tensor, v: Tensor, packing: Packing | None) -> None:
        """Keep the newest token of new ones [B, T, h_kv, d], and of sequences that have none among them the former."""
        if packing is None:
            self.newest = k[:, -1:].clone(), v[:, -1:].clone(), torch.ones(len(k), dtype=torch.bool, device=k.device)
            return
        has_new = packing.counts > 0
        last = (packing.counts - 1).clamp(min=0)
        newest = [packing.pack(x.flatten(2)).take_along_dim(last[:, None, None], 1).view_as(x[:, :1]) for x in (k, v)]
        if self.newest is None:
            self.newest = newest[0], newest[1], has_new
            return
        *former, any_read = self.newest
        kept = [torch.where(has_new[:, None, None, None], *both) for both in zip(newest, former, strict=True)]
        self.newest = kept[0], kept[1], any_read | has_new

    def _replace_tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._replace_tensors(change)
        if self.newest is not None:
            k, v, any_read = map(change, self.newest)
            self.newest = k, v, any_read


def before(x: Tensor, newest: Tensor | None, packing: Packing | None) -> Tensor:
    """Shift [B, T, h_kv, d] by one token, with zeros before a sequence's first.

    Args:
        newest: value of the newest cached token, [B, 1, h_kv, d]; None if the cache is empty.
    """
    packed = x.flatten(2) if packing is None else packing.pack(x.flatten(2))
    first = torch.zeros_like(packed[:, :1]) if newest is None else newest.flatten(2)
    shifted = torch.cat([first, packed[:, :-1]], 1)
    return (shifted if packing is None else packing.unpack(shifted)).view_as(x)
