"""The positions, masks and memory that a SambaY model hands its layers with each call."""

from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from diffquant.model.packing import Packing
from diffquant.model.reading import Reading
from diffquant.model.sambay.cache import SambaYCache
from diffquant.model.windowed_cache import WindowsCache


@dataclass(frozen=True)
class SambaYReading(Reading):
    """New tokens [B, T] beside cached ones.

    Attributes:
        packing: layout of the padding among the new tokens; None if there is none.
    """

    cache: SambaYCache | None
    packing: Packing | None = None

    @classmethod
    def of(cls, valid: Tensor | None, length: int, window: int | None, cache: WindowsCache | None) -> Self:
        reading = super().of(valid, length, window, cache)
        return replace(reading, packing=Packing.of(None if valid is None else valid[:, -length:]))
