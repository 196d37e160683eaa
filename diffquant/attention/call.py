"""The arguments of one attention, together."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from diffquant.attention.mask import Mask
from diffquant.errors import UsageError
from diffquant.kernels.arguments import PairNorm


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
        q, k, v = self.q, self.k, self.v
        maps = len(q)
        if maps not in (1, 2) or len(k) != maps or (self.lam is None) != (maps == 1):
            raise UsageError(
                f"attention takes one map without λ or two with it; got {maps} Q, {len(k)} K, λ {self.lam is not None}"
            )
        places = sorted({f"{x.dtype} on {x.device}" for x in (*q, *k, v)})
        if len(places) > 1:
            raise UsageError(f"attention: q, k and v mix {places}")
        batch, heads, _, width = q[0].shape
        kv_shape = (batch, v.shape[1], v.shape[2], width)
        wrong = [f"q {list(x.shape)}" for x in q if x.shape != q[0].shape]
        wrong += [f"k {list(x.shape)}" for x in k if x.shape != kv_shape]
        if wrong or v.shape[0] != batch or heads % v.shape[1]:
            raise UsageError(
                f"attention: shapes disagree: q {list(q[0].shape)}, v {list(v.shape)}"
                + "".join(f", {w}" for w in wrong)
            )

    @property
    def length(self) -> int:
        """T."""
        return self.q[0].shape[2]
