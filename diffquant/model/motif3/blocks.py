"""The blocks of a Motif-3 model, as plain data. The modules are named as the checkpoint names them."""

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
    below,
    linear,
)
from diffquant.recipe.targets import LAYER_TARGETS


@dataclass(frozen=True)
class LatentAttentionBlock(Block):
    """Attention whose queries, and whose keys and values, are made of a latent each, gated before its output.

    Attributes:
        layer: number of its layer.
        spec: specification of the attention.
        width: hidden width.
        query_latent: width of what queries and gates are made of.
        latent: width of what keys and values are made of, which is kept of each token.
        rope: number of a head's channels that turn, the last ones; all heads share them in their keys.
        eps: epsilon of the latents' norms.
        frequencies: angle that each pair of turning channels turns by from one position to the next.
        scale_factor: factor of the logits beside the specification's scale.
        window: number of newest tokens that a query sees, itself included; None for all.
    """

    module = "diffquant.model.motif3.attention:LatentAttention"
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
        """Number of a head's channels that do not turn, which keys take from the latent."""
        return self.spec.head_dim - self.rope

    def parameters(self) -> Parameters:
        spec, inner = self.spec, self.spec.pairs * self.spec.value_dim
        return {
            **linear("wq_a", self.query_latent, self.width),
            **below("q_norm", RMSNormBlock(self.query_latent, self.eps).parameters()),
            **linear("wq_b", spec.layout.height("q_proj"), self.query_latent, projection="q_proj"),
            **linear("wq_b_gate", inner, self.query_latent, packing="named"),
            **linear("wkv_a", self.latent + self.rope, self.width),
            **below("kv_norm", RMSNormBlock(self.latent, self.eps).parameters()),
            **linear("wkv_b", spec.kv_pairs * (self.plain + spec.value_dim), self.latent),
            **linear("lambda_proj", spec.gates, self.width, packing="named"),
            **linear("wo", self.width, inner),
        }

    @property
    def stored(self) -> TokenRows:
        """The turned channels of keys as a key, and the latent as a value."""
        return TokenRows((1, self.rope), (1, self.latent), self.window)


@dataclass(frozen=True)
class PolySettings:
    """How a network's PolyNorm is applied.

    Attributes:
        scale: factor behind the product of gate and value.
        clamp: largest magnitude of gate and value, and of what an expert makes of them.
        bias_clamp: largest magnitude of an expert's bias; None for any.
        sigmoid: whether its weights are sigmoids of the parameters.
    """

    scale: float
    clamp: float
    bias_clamp: float | None
    sigmoid: bool


@dataclass(frozen=True)
class PolyMLPBlock(MLPBlock):
    """A gated network with PolyNorm, of a layer, or one that all tokens share beside their experts.

    Attributes:
        poly: how PolyNorm is applied.
    """

    module = "diffquant.model.motif3.experts:PolyMLP"

    poly: PolySettings = field(kw_only=True)

    def parameters(self) -> Parameters:
        return {name: replace(each, is_wide=name.startswith("act_fn.")) for name, each in super().parameters().items()}


@dataclass(frozen=True)
class ExpertsBlock(Block):
    """A router, networks of which each token takes some, and one that all take.

    Attributes:
        width: hidden width.
        inner: width of an expert between its two steps.
        experts: number of experts.
        chosen: number of those that a token takes.
        scale: factor of their shares.
        normed: whether the shares of a token's experts add up to one before that factor.
        biased: whether a bias of each expert takes part in the choice, though not in its share.
        poly: how PolyNorm is applied.
        shared: the network that all tokens take.
    """

    module = "diffquant.model.motif3.experts:Experts"
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

    def parameters(self) -> Parameters:
        router = Parameter((self.experts, self.width), "named", is_wide=True)
        return {
            "router.gate.weight": router,
            **({"expert_bias": Parameter((self.experts,), is_wide=True)} if self.biased else {}),
            "experts.gate_up_proj": Parameter((self.experts, 2 * self.inner, self.width), "weights"),
            "experts.down_proj": Parameter((self.experts, self.width, self.inner), "weights"),
            "experts.act_fn.weight": Parameter((self.experts, 3), is_wide=True),
            "experts.act_fn.bias": Parameter((self.experts, 1), is_wide=True),
            **below("shared_experts", self.shared.parameters()),
        }


@dataclass(frozen=True)
class StreamsBlock(Block):
    """Gates between the residual streams and a part of a layer: what it reads, how streams mix, where it writes.

    Attributes:
        width: hidden width D of a stream.
        streams: number E of residual streams.
        rounds: number of times that rows and columns of the mixing matrix are made to add up to one.
        post_scale: largest factor that a part's output enters a stream with.
    """

    module = "diffquant.model.motif3.streams:Streams"

    width: int
    streams: int
    rounds: int
    post_scale: float

    @property
    def gates(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each gate's values."""
        return {"pre": (self.streams,), "post": (self.streams,), "res": (self.streams, self.streams)}

    def parameters(self) -> Parameters:
        all_streams = self.streams * self.width
        heights = {name: math.prod(shape) for name, shape in self.gates.items()}
        shapes: dict[str, tuple[int, ...]] = {"rms_norm.weight": (all_streams,)}
        shapes |= {f"proj_{name}.weight": (height, all_streams) for name, height in heights.items()}
        shapes |= {f"alpha_{name}": (1,) for name in self.gates}
        shapes |= {f"bias_{name}": shape for name, shape in self.gates.items()}
        return {name: Parameter(shape, is_wide=True) for name, shape in shapes.items()}


def predicted_parameters(attention: LatentAttentionBlock, network: PolyMLPBlock, norm: RMSNormBlock) -> Parameters:
    """Parameters of a layer that predicts one token more, which checkpoints carry and nothing here runs.

    Matrices in it are packed where an override names them.
    """
    kept: Packing = "named"
    parameters = {
        **below("embed_norm", norm.parameters()),
        **linear("input_proj", norm.width, 2 * norm.width),
        **below("input_layernorm", norm.parameters()),
        **below("self_attn", attention.parameters()),
        **below("post_attention_layernorm", norm.parameters()),
        **below("mlp", network.parameters()),
        **below("final_layernorm", norm.parameters()),
    }
    return {
        name: replace(each, packing=kept) if each.packing == "weights" else each for name, each in parameters.items()
    }
