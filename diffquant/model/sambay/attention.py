"""SambaY's attention: DIFF V1 without rotation, over a window, over all, or over another layer's keys and values."""

from torch import Tensor, nn

from diffquant.errors import UsageError
from diffquant.model.attention import PairAttention, without_padding
from diffquant.model.linears import add_linears
from diffquant.model.sambay.blocks import FusedAttentionBlock
from diffquant.model.sambay.reading import SambaYReading

KeysValues = tuple[Tensor, Tensor]


class SambaYAttention(nn.Module):
    """Attention of a layer, its projections in one weight with a bias.

    Attributes:
        inner_cross_attn: λ, maps and norm, under the name that checkpoints have for them.
        window: number of newest keys that a query sees; None if there is no window.
        has_own_keys: whether the layer keeps keys and values of its own.
    """

    Wqkv: nn.Linear
    out_proj: nn.Linear

    def __init__(self, block: FusedAttentionBlock) -> None:
        super().__init__()
        self.layer, self.window, self.has_own_keys = block.layer, block.window, block.stored is not None
        self.layout, self.heights = block.spec.layout, block.heights
        self.inner_cross_attn = PairAttention(block.spec, block.layer)
        add_linears(self, block)

    def forward(self, x: Tensor, reading: SambaYReading, shared: KeysValues | None) -> tuple[Tensor, KeysValues]:
        """Output [B, T, D] for an input x [B, T, D], and the keys and values that its queries read.

        Args:
            shared: keys and values that an earlier layer left; only layers without their own read them.
        """
        q, k, v = self.project(x, shared)
        mask = reading.mask(self.window)
        if self.has_own_keys and reading.cache is not None:
            k, v = reading.cache.update(without_padding(k, mask), v, self.layer, needed=reading.needed)
        y = self.inner_cross_attn.attend(q, k, v, self.inner_cross_attn.scalar_lam(), mask)
        return self.out_proj(y), (k, v)

    def project(self, x: Tensor, shared: KeysValues | None) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG002
        """Queries of x, and the keys and values that they read but for those of a cache, [B, heads, T, width] each."""
        q, k, v = self.Wqkv(x).split(self.heights, -1)
        return self.layout.queries(q), self.layout.keys(k), self.layout.values(v)


class CrossAttention(SambaYAttention):
    """Attention of a layer's own queries over the keys and values that an earlier layer left."""

    def project(self, x: Tensor, shared: KeysValues | None) -> tuple[Tensor, Tensor, Tensor]:
        if shared is None:
            raise UsageError(f"layer {self.layer} reads keys and values that no earlier layer left")
        return self.layout.queries(self.Wqkv(x)), *shared
