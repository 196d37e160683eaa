"""The blocks of a SambaY model, as plain data. The modules are named as the checkpoints name them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from diffquant.family.heads import PROJECTIONS
from diffquant.family.spec import DiffSpec
from diffquant.model.blocks import (
    Block,
    MLPBlock,
    Parameter,
    Parameters,
    RMSNormBlock,
    Shape,
    TokenRows,
    linear,
    pair_parameters,
    token_rows,
)
from diffquant.recipe.targets import LAYER_TARGETS

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class FusedAttentionBlock(Block):
    """Attention with its projections in one weight.

    Attributes:
        layer: number of its layer, which λ_init depends on.
        spec: specification of the attention.
        width: hidden width.
        kind: windowed, full or cross attention.
        window: number of newest keys that a query sees; None if there is no window.
    """

    module = "diffquant.model.sambay.attention:SambaYAttention"
    targets: ClassVar[tuple[str, ...]] = LAYER_TARGETS

    layer: int
    spec: DiffSpec
    width: int
    kind: str
    window: int | None = None

    @property
    def heights(self) -> list[int]:
        """Rows of each projection in the one weight."""
        return [self.spec.layout.height(name) for name in PROJECTIONS]

    def parameters(self) -> Parameters:
        pair = pair_parameters(self.spec, is_wide=True)
        return {
            **linear("Wqkv", sum(self.heights), self.width, biased=True),
            **linear("out_proj", self.width, self.spec.pairs * self.spec.value_dim, biased=True),
            **{f"inner_cross_attn.{name}": parameter for name, parameter in pair.items()},
        }

    @property
    def stored(self) -> TokenRows | None:
        return token_rows(self.spec, self.window)


class CrossAttentionBlock(FusedAttentionBlock):
    """Attention of a layer's own queries over the keys and values that an earlier layer keeps."""

    module = "diffquant.model.sambay.attention:CrossAttention"
    targets = ("logits", "qk", "p", "pv")

    @property
    def heights(self) -> list[int]:
        return super().heights[:1]

    @property
    def stored(self) -> None:
        return None


@dataclass(frozen=True)
class MambaBlock(Block):
    """Mamba-1.

    Attributes:
        width: hidden width.
        inner: channels E.
        states: N, width of a channel's state.
        seen: number of tokens that the convolution sees.
        rank: rank of the projection to step sizes.
    """

    module = "diffquant.model.sambay.mamba:Mamba"
    kind = "mamba"

    width: int
    inner: int
    states: int
    seen: int
    rank: int

    def parameters(self) -> Parameters:
        return {
            **linear("in_proj", 2 * self.inner, self.width),
            "conv1d.weight": Parameter((self.inner, 1, self.seen)),
            "conv1d.bias": Parameter((self.inner,)),
            **linear("x_proj", self.rank + 2 * self.states, self.inner),
            # It is small.
            **linear("dt_proj", self.inner, self.rank, biased=True, packing="named"),
            **linear("out_proj", self.width, self.inner),
            # They go into an exponential, and the reference computes with them in float32.
            "A_log": Parameter((self.inner, self.states), is_wide=True),
            "D": Parameter((self.inner,), is_wide=True),
        }

    @property
    def stored(self) -> tuple[Shape, ...]:
        """Newest inputs of the convolution, and the state."""
        return (self.seen - 1, self.inner), (self.inner, self.states)


@dataclass(frozen=True)
class GatedMemoryBlock(Block):
    """A gate on the memory that the last Mamba layer leaves.

    Attributes:
        width: hidden width.
        inner: channels E of the memory.
    """

    module = "diffquant.model.sambay.mamba:GatedMemory"
    kind = "gated memory"

    width: int
    inner: int

    def parameters(self) -> Parameters:
        return linear("in_proj", self.inner, self.width) | linear("out_proj", self.width, self.inner)


class FusedMLPBlock(MLPBlock):
    """A gated network whose gate and value lie in one weight, the gate first; its activation has no parameters."""

    module = "diffquant.model.sambay.layer:SambaYMLP"

    def parameters(self) -> Parameters:
        return linear("fc1", 2 * self.inner, self.width) | linear("fc2", self.width, self.inner)


class LayerNormBlock(RMSNormBlock):
    """A LayerNorm with a weight and a bias."""

    def parameters(self) -> Parameters:
        return super().parameters() | {"bias": Parameter((self.width,))}

    def new_module(self) -> "nn.Module":
        from torch.nn import LayerNorm

        return LayerNorm(self.width, self.eps)
