"""The blocks of a Motif-3 model as plain data, with modules named as in its checkpoints."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from diffquant.family.spec import DiffSpec
from diffquant.model.blocks import (
    Block,
    CachedShapes,
    MLPBlock,
    Packing,
    Parameters,
    ParameterSpec,
    RMSNormBlock,
    linear_parameters,
    prefix_names,
)
from diffquant.recipe.targets import LAYER_TARGETS


@dataclass(frozen=True)
class LatentAttentionBlock(Block):
    """Attention with queries from one latent, keys and values from another, and an output gate.

    Attributes:
        layer: 0-based index of its layer.
        spec: specification of the attention.
        width: hidden width.
        query_latent: width of the latent from which queries and output gates are computed.
        latent: width of the latent from which keys and values are computed, cached per token.
        rope: number of rotated channels, the last ones of a head; the rotated key channels are shared by all heads.
        eps: epsilon of the latents' norms.
        frequencies: RoPE angle per position of each pair of rotated channels.
        scale_factor: additional factor of the logits.
        window: number of newest tokens that a query sees, itself included, or None if it sees all.
    """

    module = "diffquant.model.motif3.attention:LatentAttention"
    export = "diffquant.onnx.architectures.motif3:add_latent_attention"
    targets: ClassVar[tuple[str, ...]] = LAYER_TARGETS

    layer: int
    spec: DiffSpec
    width: int
    query_latent: int
    latent: int
    rope: int
    eps: float
    frequencies: Sequence[float]
    scale_factor: float = 1.0
    window: int | None = None

    @property
    def kind(self) -> str:  # type: ignore[override]
        return "latent attention" if self.window is None else "windowed latent attention"

    @property
    def unrotated_width(self) -> int:
        """Number of unrotated channels per head. Those of keys are computed from the latent."""
        return self.spec.head_dim - self.rope

    def parameter_specs(self) -> Parameters:
        spec, inner = self.spec, self.spec.pairs * self.spec.value_dim
        return {
            **linear_parameters("wq_a", self.query_latent, self.width),
            **prefix_names("q_norm", RMSNormBlock(self.query_latent, self.eps).parameter_specs()),
            **linear_parameters("wq_b", spec.layout.row_count("q_proj"), self.query_latent, projection="q_proj"),
            "wq_b_gate.weight": ParameterSpec((inner, self.query_latent), "named", is_large=True),
            **linear_parameters("wkv_a", self.latent + self.rope, self.width),
            **prefix_names("kv_norm", RMSNormBlock(self.latent, self.eps).parameter_specs()),
            "wkv_b.weight": ParameterSpec(
                (spec.kv_pairs * (self.unrotated_width + spec.value_dim), self.latent), "weights", by_head=True
            ),
            **linear_parameters("lambda_proj", spec.gate_count, self.width, packing="named"),
            **linear_parameters("wo", self.width, inner),
        }

    @property
    def cached_shapes(self) -> CachedShapes:
        """Shapes in the cache: the rotated key channels as one key head, and the latent as one value head."""
        return CachedShapes((1, self.rope), (1, self.latent), self.window, is_latent=True)


@dataclass(frozen=True)
class PolySettings:
    """The settings of PolyNorm in an MLP or expert.

    Attributes:
        scale: factor of the product PolyNorm(gate) · up.
        clamp: largest magnitude of gate and up in an MLP, and of their product in an expert.
        bias_clamp: largest magnitude of an expert's PolyNorm bias, or None if it is not limited.
        sigmoid: whether PolyNorm's weights are the sigmoids of its parameters.
    """

    scale: float
    clamp: float
    bias_clamp: float | None
    sigmoid: bool


@dataclass(frozen=True)
class PolyMLPBlock(MLPBlock):
    """A gated MLP with PolyNorm: the MLP of a dense layer, or the shared expert.

    Attributes:
        poly: settings of PolyNorm.
    """

    module = "diffquant.model.motif3.experts:PolyMLP"
    export = "diffquant.onnx.architectures.experts:add_poly_mlp"

    poly: PolySettings = field(kw_only=True)

    def parameter_specs(self) -> Parameters:
        specs = super().parameter_specs()
        return {name: replace(each, is_float32=name.startswith("act_fn.")) for name, each in specs.items()}


@dataclass(frozen=True)
class ExpertsBlock(Block):
    """A mixture of experts: a router, routed experts, and a shared expert for all tokens.

    Attributes:
        width: hidden width.
        inner: intermediate width of a routed expert.
        experts: number of routed experts.
        chosen: number of experts per token (top-k).
        scale: factor of the routing weights.
        normed: whether a token's routing weights are normalized to sum to 1 before `scale` is applied.
        biased: whether experts have a bias that affects their selection, but not their routing weights.
        poly: settings of PolyNorm in the routed experts.
        shared: the shared expert.
    """

    module = "diffquant.model.motif3.experts:Experts"
    export = "diffquant.onnx.architectures.experts:add_experts"
    kind = "experts"

    width: int
    inner: int
    experts: int
    chosen: int
    scale: float
    normed: bool
    biased: bool
    poly: PolySettings
    shared: PolyMLPBlock

    def parameter_specs(self) -> Parameters:
        router = ParameterSpec((self.experts, self.width), "named", is_float32=True)
        return {
            "router.gate.weight": router,
            **({"expert_bias": ParameterSpec((self.experts,), is_float32=True)} if self.biased else {}),
            "experts.gate_up_proj": ParameterSpec((self.experts, 2 * self.inner, self.width), "weights"),
            "experts.down_proj": ParameterSpec((self.experts, self.width, self.inner), "weights"),
            "experts.act_fn.weight": ParameterSpec((self.experts, 3), is_float32=True),
            "experts.act_fn.bias": ParameterSpec((self.experts, 1), is_float32=True),
            **prefix_names("shared_experts", self.shared.parameter_specs()),
        }


@dataclass(frozen=True)
class StreamGatesBlock(Block):
    """Gates that connect a sublayer (attention or MLP) to the residual streams.

    They weigh the streams for the sublayer's input ("pre"), mix the streams ("res"), and weigh the sublayer's output
    for each stream ("post").

    Attributes:
        width: hidden width D of a stream.
        streams: number E of residual streams.
        rounds: number of Sinkhorn iterations that normalize the mixing matrix.
        post_scale: largest factor with which the sublayer's output is added to a stream.
    """

    module = "diffquant.model.motif3.modeling:StreamGates"
    export = "diffquant.onnx.architectures.motif3:add_read_streams"

    width: int
    streams: int
    rounds: int
    post_scale: float

    @property
    def gate_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each gate per token, by name: "pre" and "post" [E], "res" [E, E]."""
        return {"pre": (self.streams,), "post": (self.streams,), "res": (self.streams, self.streams)}

    def parameter_specs(self) -> Parameters:
        all_streams = self.streams * self.width
        heights = {name: math.prod(shape) for name, shape in self.gate_shapes.items()}
        shapes: dict[str, tuple[int, ...]] = {"rms_norm.weight": (all_streams,)}
        shapes |= {f"proj_{name}.weight": (height, all_streams) for name, height in heights.items()}
        shapes |= {f"alpha_{name}": (1,) for name in self.gate_shapes}
        shapes |= {f"bias_{name}": shape for name, shape in self.gate_shapes.items()}
        return {name: ParameterSpec(shape, is_float32=True) for name, shape in shapes.items()}


def mtp_parameters(attention: LatentAttentionBlock, network: PolyMLPBlock, norm: RMSNormBlock) -> Parameters:
    """Return the parameters of a multi-token prediction layer, which checkpoints contain but models here do not run.

    Its matrices are quantized only under overrides that name them.
    """
    kept: Packing = "named"
    parameters = {
        **prefix_names("embed_norm", norm.parameter_specs()),
        **linear_parameters("input_proj", norm.width, 2 * norm.width),
        **prefix_names("input_layernorm", norm.parameter_specs()),
        **prefix_names("self_attn", attention.parameter_specs()),
        **prefix_names("post_attention_layernorm", norm.parameter_specs()),
        **prefix_names("mlp", network.parameter_specs()),
        **prefix_names("final_layernorm", norm.parameter_specs()),
    }
    return {
        name: replace(each, packing=kept) if each.packing == "weights" else each for name, each in parameters.items()
    }
