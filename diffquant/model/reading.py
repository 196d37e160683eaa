"""Positions and masks of the tokens that a model reads, for layers with and without a window."""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from diffquant.family.mask import Mask
from diffquant.model.windowed_cache import WindowsCache


@dataclass(frozen=True)
class Reading:
    """New tokens [B, T] beside cached ones.

    Attributes:
        whole: mask of layers that see all tokens.
        windowed: mask of layers that see a window, over the tokens that these hold and the new ones.
        needed: number of the newest tokens that windowed layers go on holding.
        cache: cache to read and extend; None to keep nothing.
    """

    whole: Mask
    windowed: Mask
    needed: int
    cache: WindowsCache | None

    @classmethod
    def of(cls, valid: Tensor | None, length: int, window: int | None, cache: WindowsCache | None) -> Self:
        """The reading of T = `length` new tokens.

        Args:
            valid: validity [B, S] of cached and new tokens; None if there is no padding.
            window: number of newest tokens that windowed layers see; None if there is no window.
            cache: cache of the earlier tokens.
        """
        near = length + (cache.held if cache is not None else 0)
        windowed = Mask(None if valid is None else valid[:, -near:], window)
        return cls(Mask(valid), windowed, windowed.needed_keys(near), cache)

    def mask(self, window: int | None) -> Mask:
        """Mask of a layer with that window."""
        return self.whole if window is None else self.windowed
