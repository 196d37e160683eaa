"""The architecture of `SambaY` and its blocks as plain data, named as in checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from diffquant.family.heads import PROJECTIONS
from diffquant.family.spec import DiffSpec
from diffquant.model.architecture import Architecture
from diffquant.model.blocks import (
    Block,
    Blocks,
    CachedShapes,
    MLPBlock,
    Parameters,
    ParameterSpec,
    RMSNormBlock,
    Shape,
    cached_shapes,
    lam_and_norm_parameters,
    linear_parameters,
    prefix_names,
)
from diffquant.recipe.targets import LAYER_TARGETS

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class FusedAttentionBlock(Block):
    """Attention with its Q, K and V projections in one weight; cross attention has only a Q projection.

    Attributes:
        layer: 0-based index of its layer, which λ_init depends on.
        spec: specification of the attention.
        width: hidden width.
        kind: "windowed attention", "full attention" or "cross attention".
        window: number of newest keys that a query sees, or None if there is no window.
        is_cross: whether it uses the keys and values of an earlier layer.
    """

    module = "diffquant.model.sambay.layers:SambaYAttention"
    export = "diffquant.onnx.architectures.sambay:add_attention"

    layer: int
    spec: DiffSpec
    width: int
    kind: str
    window: int | None = None
    is_cross: bool = False

    @property
    def targets(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("logits", "qk", "p", "pv") if self.is_cross else LAYER_TARGETS

    @property
    def row_counts(self) -> list[int]:
        """Number of rows of each projection in the fused weight: Q, K and V, or only Q for cross attention."""
        return [self.spec.layout.row_count(name) for name in PROJECTIONS[: 1 if self.is_cross else None]]

    def parameter_specs(self) -> Parameters:
        return {
            **linear_parameters("Wqkv", sum(self.row_counts), self.width, biased=True),
            **linear_parameters("out_proj", self.width, self.spec.pairs * self.spec.value_dim, biased=True),
            **prefix_names("inner_cross_attn", lam_and_norm_parameters(self.spec, is_float32=True)),
        }

    @property
    def cached_shapes(self) -> CachedShapes | None:
        return None if self.is_cross else cached_shapes(self.spec, self.window)


@dataclass(frozen=True)
class MambaBlock(Block):
    """Mamba-1.

    Attributes:
        width: hidden width.
        inner: E, number of channels.
        states: N, width of a channel's state.
        kernel_size: number of tokens that the convolution covers.
        rank: rank of the projection to step sizes.
    """

    module = "diffquant.model.sambay.layers:Mamba"
    export = "diffquant.onnx.architectures.sambay:add_mamba"
    kind = "mamba"

    width: int
    inner: int
    states: int
    kernel_size: int
    rank: int

    def parameter_specs(self) -> Parameters:
        return {
            **linear_parameters("in_proj", 2 * self.inner, self.width),
            "conv1d.weight": ParameterSpec((self.inner, 1, self.kernel_size)),
            "conv1d.bias": ParameterSpec((self.inner,)),
            **linear_parameters("x_proj", self.rank + 2 * self.states, self.inner),
            # It is small, so it is quantized only under an override.
            **linear_parameters("dt_proj", self.inner, self.rank, biased=True, packing="named"),
            **linear_parameters("out_proj", self.width, self.inner),
            # They are used in an exponential, in float32 as in the reference.
            "A_log": ParameterSpec((self.inner, self.states), is_float32=True),
            "D": ParameterSpec((self.inner,), is_float32=True),
        }

    @property
    def cached_shapes(self) -> tuple[Shape, ...]:
        """Shapes of the convolution's newest inputs and of the state, without the batch axis."""
        return (self.kernel_size - 1, self.inner), (self.inner, self.states)


@dataclass(frozen=True)
class GatedMemoryBlock(Block):
    """A gated memory unit: gates the scan output of the last Mamba layer.

    Attributes:
        width: hidden width.
        inner: E, number of channels of the memory.
    """

    module = "diffquant.model.sambay.layers:GatedMemory"
    export = "diffquant.onnx.architectures.sambay:add_gated_memory"
    kind = "gated memory"

    width: int
    inner: int

    def parameter_specs(self) -> Parameters:
        return linear_parameters("in_proj", self.inner, self.width) | linear_parameters(
            "out_proj", self.width, self.inner
        )


class FusedMLPBlock(MLPBlock):
    """A gated MLP with gate and up projection in one weight, the gate first; its activation has no parameters."""

    module = "diffquant.model.sambay.layers:SambaYMLP"
    export = "diffquant.onnx.architectures.sambay:add_mlp"

    def parameter_specs(self) -> Parameters:
        return linear_parameters("fc1", 2 * self.inner, self.width) | linear_parameters("fc2", self.width, self.inner)


class LayerNormBlock(RMSNormBlock):
    """A LayerNorm with a weight and a bias."""

    export = "diffquant.onnx.architectures.sambay:add_norm"

    def parameter_specs(self) -> Parameters:
        return super().parameter_specs() | {"bias": ParameterSpec((self.width,))}

    def new_module(self) -> "nn.Module":
        from torch.nn import LayerNorm

        return LayerNorm(self.width, self.eps)


@dataclass(frozen=True, kw_only=True)
class SambaYArchitecture(Architecture):
    """A decoder with token mixers of five kinds; the number of layers is a multiple of four.

    Attributes:
        layer_norm_eps: epsilon of the LayerNorms.
        sliding_window: number of newest tokens that windowed layers see, or None if there is no window.
        mamba_d_state: N, width of a channel's state.
        mamba_d_conv: number of tokens that the convolution covers.
        mamba_expand: ratio of the number of channels E of Mamba and memory to the hidden width.
        mamba_dt_rank: rank of the projection to step sizes.
    """

    model = "diffquant.model.sambay.modeling:SambaY"
    export = "diffquant.onnx.architectures.sambay:SambaYDecoder"
    served = "diffquant.serving.vllm.sambay:SambaYForCausalLM"
    modelling_file = "modeling_sambay.py"

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
        """Return the token mixer of a 0-based layer.

        Lower layers alternate Mamba and windowed attention, followed by one full attention. Upper layers alternate
        gated memory units and cross attention, which uses the full attention's keys and values.
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
        return FusedAttentionBlock(layer, spec, width, "cross attention", is_cross=True)
