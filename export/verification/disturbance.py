"""Random factors about 1, by which rounding disturbs results."""

from functools import cache

import torch
from torch import Tensor

# How many normal numbers there are, and how many places behind the row before each row of a result begins.
_NORMALS, _ROW_STEP = 2**22, 61


class Disturbance:
    """Disturbs results at random, in the same way after each `restart`.

    All results take their factors from one supply of normal numbers, each from a random place on: drawing as many anew
    takes longer than most products that they disturb.
    """

    def __init__(self) -> None:
        self._random = torch.Generator()

    def restart(self) -> None:
        """Draw the same places again."""
        self._random.manual_seed(0)

    def normals(self, count: int) -> Tensor:
        """New normal numbers."""
        return torch.randn(count, generator=self._random)

    def of(self, x: Tensor, size: float) -> Tensor:
        """x [..., N] times factors whose distance from 1 is normal, with a standard deviation of `size`."""
        rows = x.flatten(0, -2)
        disturbed: Tensor = torch.addcmul(rows, rows, self._window(*rows.shape), value=size)
        return disturbed.view(x.shape)

    def _window(self, rows: int, width: int) -> Tensor:
        """Normal numbers [rows, width] of the supply."""
        step = min(_ROW_STEP, (_NORMALS - width) // rows)
        places = _NORMALS - width - step * (rows - 1) + 1
        start = int(torch.randint(places, (), generator=self._random))
        return _supply().as_strided((rows, width), (step, 1), start)


@cache
def _supply() -> Tensor:
    return torch.randn(_NORMALS, generator=torch.Generator())
