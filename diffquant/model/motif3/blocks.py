"""The blocks of a Motif-3 model as plain data, with modules named as in its checkpoints."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from diffquant.family.spec import DiffSpec
from diffquant.model.blocks import (
    Block,
    MLPBlock,
    Packing,
    Parameter,
    Parameters,
    RMSNormBlock,
    TokenRows,
    linear,
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
    export = "diffquant.onnx.architectures.motif3:latent_attention"
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
    def plain(self) -> int:
        """Number of unrotated channels per head, which keys compute from the latent."""
        return self.spec.head_dim - self.rope

    def parameter_specs(self) -> Parameters:
        spec, inner = self.spec, self.spec.pairs * self.spec.value_dim
        return {
            **linear("wq_a", self.query_latent, self.width),
            **prefix_names("q_norm", RMSNormBlock(self.query_latent, self.eps).parameter_specs()),
            **linear("wq_b", spec.layout.height("q_proj"), self.query_latent, projection="q_proj"),
            "wq_b_gate.weight": Parameter((inner, self.query_latent), "named", is_large=True),
            **linear("wkv_a", self.latent + self.rope, self.width),
            **prefix_names("kv_norm", RMSNormBlock(self.latent, self.eps).parameter_specs()),
            "wkv_b.weight": Parameter(
                (spec.kv_pairs * (self.plain + spec.value_dim), self.latent), "weights", by_head=True
            ),
            **linear("lambda_proj", spec.gates, self.width, packing="named"),
            **linear("wo", self.width, inner),
        }

    @property
    def stored(self) -> TokenRows:
        """Shapes in the cache: the rotated key channels as one key head, and the latent as one value head."""
        return TokenRows((1, self.rope), (1, self.latent), self.window, is_latent=True)


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
    export = "diffquant.onnx.architectures.experts:poly_mlp"

    poly: PolySettings = field(kw_only=True)

    def parameter_specs(self) -> Parameters:
        return {
            name: replace(each, is_wide=name.startswith("act_fn.")) for name, each in super().parameter_specs().items()
        }


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
    export = "diffquant.onnx.architectures.experts:experts"
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
        router = Parameter((self.experts, self.width), "named", is_wide=True)
        return {
            "router.gate.weight": router,
            **({"expert_bias": Parameter((self.experts,), is_wide=True)} if self.biased else {}),
            "experts.gate_up_proj": Parameter((self.experts, 2 * self.inner, self.width), "weights"),
            "experts.down_proj": Parameter((self.experts, self.width, self.inner), "weights"),
            "experts.act_fn.weight": Parameter((self.experts, 3), is_wide=True),
            "experts.act_fn.bias": Parameter((self.experts, 1), is_wide=True),
            **prefix_names("shared_experts", self.shared.parameter_specs()),
        }


@dataclass(frozen=True)
class StreamsBlock(Block):
    """Gates between the residual streams and a sublayer (attention or MLP): of its input, the mixing and its output.

    Attributes:
        width: hidden width D of a stream.
        streams: number E of residual streams.
        rounds: number of Sinkhorn iterations that normalize the mixing matrix.
        post_scale: largest factor with which the sublayer's output is added to a stream.
    """

    module = "diffquant.model.motif3.modeling:Streams"
    export = "diffquant.onnx.architectures.motif3:read_streams"

    width: int
    streams: int
    rounds: int
    post_scale: float

    @property
    def gates(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the gates, by name."""
        return {"pre": (self.streams,), "post": (self.streams,), "res": (self.streams, self.streams)}

    def parameter_specs(self) -> Parameters:
        all_streams = self.streams * self.width
        heights = {name: math.prod(shape) for name, shape in self.gates.items()}
        shapes: dict[str, tuple[int, ...]] = {"rms_norm.weight": (all_streams,)}
        shapes |= {f"proj_{name}.weight": (height, all_streams) for name, height in heights.items()}
        shapes |= {f"alpha_{name}": (1,) for name in self.gates}
        shapes |= {f"bias_{name}": shape for name, shape in self.gates.items()}
        return {name: Parameter(shape, is_wide=True) for name, shape in shapes.items()}


def mtp_parameters(attention: LatentAttentionBlock, network: PolyMLPBlock, norm: RMSNormBlock) -> Parameters:
    """Return the parameters of a multi-token prediction layer, which checkpoints contain but models here do not run.

    Its matrices are quantized only under overrides that name them.
    """
    kept: Packing = "named"
    parameters = {
        **prefix_names("embed_norm", norm.parameter_specs()),
        **linear("input_proj", norm.width, 2 * norm.width),
        **prefix_names("input_layernorm", norm.parameter_specs()),
        **prefix_names("self_attn", attention.parameter_specs()),
        **prefix_names("post_attention_layernorm", norm.parameter_specs()),
        **prefix_names("mlp", network.parameter_specs()),
        **prefix_names("final_layernorm", norm.parameter_specs()),
    }
    return {
        name: replace(each, packing=kept) if each.packing == "weights" else each for name, each in parameters.items()
    }
