"""SambaY: the decoder of Phi-4-mini-flash-reasoning, its layers, and a walk through them.

Source: arXiv 2507.06607; the modelling code of microsoft/Phi-4-mini-flash-reasoning.
"""

from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor, nn
from torch.nn import LayerNorm
from transformers.cache_utils import Cache

from diffquant.errors import UsageError
from diffquant.model.attention import PairAttention
from diffquant.model.cache import PackedLayer
from diffquant.model.causal import CausalModel, Decoder
from diffquant.model.mlp import activation_named
from diffquant.model.sambay.attention import CrossAttention, KeysValues, SambaYAttention
from diffquant.model.sambay.cache import SambaYCache
from diffquant.model.sambay.config import SambaYConfig
from diffquant.model.sambay.kinds import Kind, kind_of, layers_of_targets
from diffquant.model.sambay.mamba import GatedMemory, Mamba
from diffquant.model.sambay.reading import Reading
from diffquant.model.walk import Walk
from diffquant.numerics.absmax import compute_dtype
from diffquant.recipe import Recipe


@dataclass(frozen=True)
class Flow:
    """What goes from layer to layer.

    Attributes:
        x: residual stream [B, T, D], in float32 at least.
        memory: what the last Mamba layer's scan gave, [B, T, E]; None before it.
        shared: keys and values that the last attention read, which cross attention reads again.
    """

    x: Tensor
    memory: Tensor | None = None
    shared: KeysValues | None = None


class SambaYMLP(nn.Module):
    """A gated network whose gate and value lie in one weight, the gate first."""

    def __init__(self, config: SambaYConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activate = activation_named(config.hidden_act).compute

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.fc1(x).chunk(2, -1)
        out: Tensor = self.fc2(value * self.activate(gate))
        return out


class SambaYLayer(nn.Module):
    """A mixer of one of the kinds and a gated network, each behind its norm and added to the residual.

    The residual stays in float32 where the parameters are of a half type, as it does behind Mamba in the reference.
    """

    def __init__(self, config: SambaYConfig, layer: int) -> None:
        super().__init__()
        self.kind: Kind = kind_of(layer, config.num_hidden_layers)
        self.layer = layer
        self.attn = _mixer(config, layer, self.kind)
        self.mlp = SambaYMLP(config)
        self.input_layernorm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.post_attention_layernorm = LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, flow: Flow, reading: Reading) -> Flow:
        mixed, flow = self._mix(self.normed(flow.x), flow, reading)
        x = flow.x + mixed
        x = x + self.mlp(_normed(self.post_attention_layernorm, x))
        return replace(flow, x=x)

    def normed(self, x: Tensor) -> Tensor:
        """The mixer's input, [B, T, D] in the parameters' dtype."""
        return _normed(self.input_layernorm, x)

    def _mix(self, x: Tensor, flow: Flow, reading: Reading) -> tuple[Tensor, Flow]:
        """The mixer's output [B, T, D], and the flow with what it leaves to later layers."""
        if isinstance(self.attn, Mamba):
            states = None if reading.cache is None else reading.cache.recurrent(self.layer)
            mixed, memory = self.attn(x, reading.packing, states)
            return mixed, replace(flow, memory=memory)
        if isinstance(self.attn, GatedMemory):
            return self.attn(x, flow.memory), flow
        mixed, shared = self.attn(x, reading, flow.shared)
        return mixed, replace(flow, shared=shared)


class SambaYModel(Decoder):
    """The decoder without its head: embedding, layers, final norm."""

    config_class = SambaYConfig
    config: SambaYConfig
    _no_split_modules = ["SambaYLayer"]  # noqa: RUF012

    def __init__(self, config: SambaYConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(SambaYLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.final_layernorm = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.recipe = Recipe()
        self.ranges: Mapping[str, Tensor] = {}
        self.post_init()

    def run_layers(
        self,
        x: Tensor,
        valid: Tensor | None,
        past: int,  # noqa: ARG002  there are no positions to count from it
        position_ids: Tensor | None,  # noqa: ARG002
        cache: Cache | None,
        states: MutableSequence[Tensor] | None,
    ) -> Tensor:
        """As `Decoder.run_layers`; positions play no part.

        Raises:
            UsageError: the cache is no `SambaYCache`.
        """
        if cache is not None and not isinstance(cache, SambaYCache):
            raise UsageError(f"{type(cache).__name__} does not hold Mamba's states; pass what new_cache() gives")
        reading = Reading.of(valid, x.shape[1], self.config.sliding_window, cache)
        flow = self.start(x)
        for layer in self.layers:
            if states is not None:
                states.append(flow.x)
            flow = layer(flow, reading)
        return _normed(self.final_layernorm, flow.x)

    @staticmethod
    def start(x: Tensor) -> Flow:
        """What the first layer gets, for embeddings [B, T, D]."""
        return Flow(x.to(compute_dtype(x)))

    def needs_own_cache(self, implementation: str | None) -> bool:  # noqa: ARG002  no other would hold the states
        return True

    def new_cache(self) -> SambaYCache:
        """An empty cache as the recipe wants it."""
        return SambaYCache(self.recipe, len(self.layers), self.config.sliding_window, self.ranges)


class SambaY(CausalModel):
    """A decoder-only language model of Mamba, windowed and shared differential attention."""

    config_class = SambaYConfig
    config: SambaYConfig
    model: SambaYModel
    _no_split_modules = ["SambaYLayer"]  # noqa: RUF012

    def __init__(self, config: SambaYConfig) -> None:
        super().__init__(config)
        self.model = SambaYModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @property
    def attentions(self) -> Sequence[PairAttention]:
        mixers = (cast(SambaYLayer, layer).attn for layer in self.model.layers)
        return [mixer.inner_cross_attn for mixer in mixers if isinstance(mixer, SambaYAttention)]

    @property
    def target_layers(self) -> Mapping[str, Sequence[int]]:
        return layers_of_targets(len(self.model.layers))

    def walk(self, length: int) -> "SambaYWalk":
        return SambaYWalk(self, length)

    def stored_layers(self) -> Sequence[PackedLayer]:
        return [layer for layer in self.model.new_cache().layers if isinstance(layer, PackedLayer)]


@dataclass(frozen=True)
class SambaYWalk(Walk[Flow]):
    """A SambaY model's layers over sequences of one length.

    Attributes:
        model: model that is walked through.
        length: number of tokens of a sequence.
    """

    model: SambaY
    length: int

    @property
    def layers(self) -> list[SambaYLayer]:
        return [cast(SambaYLayer, layer) for layer in self.model.model.layers]

    def embed(self, ids: Tensor) -> Flow:
        return self.model.model.start(self.model.model.embed_tokens(ids))

    def hidden(self, state: Flow) -> Tensor:
        return state.x

    def run(self, layer: nn.Module, state: Flow) -> Flow:
        decoder = self.model.model
        # A fresh cache for each layer: of a quantized one only what the layer reads back counts.
        cache = decoder.new_cache() if decoder.has_quantized_cache else None
        out: Flow = layer(state, Reading.of(None, self.length, decoder.config.sliding_window, cache))
        return out

    def project(self, layer: nn.Module, state: Flow) -> tuple[Tensor, Tensor, Tensor] | None:
        layer = cast(SambaYLayer, layer)
        if not isinstance(layer.attn, SambaYAttention):
            return None
        return layer.attn.project(layer.normed(state.x), state.shared)

    def window(self, layer: nn.Module) -> int | None:
        mixer = cast(SambaYLayer, layer).attn
        return mixer.window if isinstance(mixer, SambaYAttention) else None


def _mixer(config: SambaYConfig, layer: int, kind: Kind) -> nn.Module:
    """The mixer of a layer."""
    if kind == "mamba":
        return Mamba(config)
    if kind == "gated memory":
        return GatedMemory(config)
    if kind == "cross attention":
        return CrossAttention(config, layer)
    return SambaYAttention(config, layer, config.sliding_window if kind == "windowed attention" else None)


def _normed(norm: LayerNorm, x: Tensor) -> Tensor:
    """LayerNorm of a residual [B, T, D], in the norm's own dtype."""
    out: Tensor = norm(x.to(norm.weight.dtype))
    return out
