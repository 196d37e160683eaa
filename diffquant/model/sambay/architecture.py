"""The architecture that `SambaY` runs, as plain data."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from diffquant.model.architecture import Architecture
from diffquant.model.blocks import Block, Blocks
from diffquant.model.sambay.blocks import (
    CrossAttentionBlock,
    FusedAttentionBlock,
    FusedMLPBlock,
    GatedMemoryBlock,
    LayerNormBlock,
    MambaBlock,
)


@dataclass(frozen=True, kw_only=True)
class SambaYArchitecture(Architecture):
    """A decoder whose layers, a multiple of four, have mixers of five kinds.

    Attributes:
        layer_norm_eps: epsilon of the LayerNorms.
        sliding_window: number of newest tokens that windowed layers see; None if there is no window.
        mamba_d_state: N, width of a channel's state.
        mamba_d_conv: number of tokens that the convolution sees.
        mamba_expand: channels E of Mamba and memory over the hidden width.
        mamba_dt_rank: rank of the projection to step sizes.
    """

    model = "diffquant.model.sambay.modeling:SambaY"

    layer_norm_eps: float
    sliding_window: int | None
    mamba_d_state: int
    mamba_d_conv: int
    mamba_expand: int
    mamba_dt_rank: int

    @cached_property
    def layers(self) -> Sequence[Blocks]:
        mlp = FusedMLPBlock(self.hidden_size, self.intermediate_size, self.hidden_act)
        norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), self.final_norm[1])
        return [{"attn": self._mixer(layer), "mlp": mlp, **norms} for layer in range(self.num_hidden_layers)]

    @property
    def final_norm(self) -> tuple[str, Block]:
        return "final_layernorm", LayerNormBlock(self.hidden_size, self.layer_norm_eps)

    def _mixer(self, layer: int) -> Block:
        """The token mixer of a 0-based layer.

        Mamba and windows below, one full attention in the middle, and above it gates on the last Mamba's memory and
        queries over the full attention's keys and values.
        """
        spec, width, inner = self.diff_spec, self.hidden_size, self.mamba_expand * self.hidden_size
        middle = self.num_hidden_layers // 2
        if layer % 2 == 0 and layer <= middle:
            return MambaBlock(width, inner, self.mamba_d_state, self.mamba_d_conv, self.mamba_dt_rank)
        if layer % 2 == 0:
            return GatedMemoryBlock(width, inner)
        if layer < middle:
            return FusedAttentionBlock(layer, spec, width, "windowed attention", self.sliding_window)
        if layer == middle + 1:
            return FusedAttentionBlock(layer, spec, width, "full attention")
        return CrossAttentionBlock(layer, spec, width, "cross attention")
