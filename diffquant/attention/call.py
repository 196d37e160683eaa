"""The arguments of one attention, together."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm
from diffquant.kernels.arguments import Visibility, attention_shape


@dataclass(frozen=True)
class Call:
    """One attention: its tensors as `naive` takes them, and the norm that follows.

    Raises:
        UsageError: arguments disagree in number, shape, dtype or device.
    """

    q: Sequence[Tensor]
    k: Sequence[Tensor]
    v: Tensor
    lam: Tensor | None
    scale: float
    mask: Mask
    post: PairNorm | None = None

    def __post_init__(self) -> None:
        attention_shape(self.q, self.k, self.v, self.lam, Visibility(), self.post)

    @property
    def length(self) -> int:
        """T."""
        return self.q[0].shape[2]
