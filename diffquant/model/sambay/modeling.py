"""SambaY: the decoder of Phi-4-mini-flash-reasoning, the model with its head, and a walk through its layers.

Source: arXiv 2507.06607; the modelling code of microsoft/Phi-4-mini-flash-reasoning.
"""

from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from torch.nn import LayerNorm
from transformers.cache_utils import Cache

from diffquant.errors import UsageError
from diffquant.family.mask import Mask
from diffquant.model.attention import PairAttention
from diffquant.model.cache import PackedLayer
from diffquant.model.causal import CausalModel, Decoder
from diffquant.model.sambay.attention import SambaYAttention
from diffquant.model.sambay.cache import SambaYCache
from diffquant.model.sambay.config import SambaYConfig
from diffquant.model.sambay.kinds import layers_of_targets
from diffquant.model.sambay.layer import Flow, SambaYLayer, normed
from diffquant.model.sambay.reading import Reading
from diffquant.model.walk import Walk
from diffquant.numbers.absmax import compute_dtype
from diffquant.recipe import Recipe


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
        mask: Mask,
        past: int,  # noqa: ARG002  there are no positions to count from it
        position_ids: Tensor | None,  # noqa: ARG002
        cache: Cache | None,
        states: MutableSequence[Tensor] | None,
    ) -> Tensor:
        """As `Decoder.run_layers`; positions play no part.

        Raises:
            UsageError: the cache is no `SambaYCache`, or the mask is another than causal order with padding.
        """
        if mask.seen is not None:
            raise UsageError(
                "Mamba's layers read tokens one after the other: neither a 4-D attention_mask nor sequences packed by "
                "position_ids can be honoured; pass sequences as rows of a batch, and an attention_mask [batch, tokens]"
            )
        if cache is not None and not isinstance(cache, SambaYCache):
            raise UsageError(f"{type(cache).__name__} does not hold Mamba's states; pass what new_cache() gives")
        reading = Reading.of(mask.keys, x.shape[1], self.config.sliding_window, cache)
        flow = self.start(x)
        for layer in self.layers:
            if states is not None:
                states.append(flow.x)
            flow = layer(flow, reading)
        return normed(self.final_layernorm, flow.x)

    @staticmethod
    def start(x: Tensor) -> Flow:
        """What the first layer gets, for embeddings [B, T, D]."""
        return Flow(x.to(compute_dtype(x)))

    def needs_own_cache(self, implementation: str | None) -> bool:  # noqa: ARG002  no other would hold the states
        return True

    @property
    def crop_refusal(self) -> str | None:
        return "Mamba's states and the windows of this model do not hold what was before"

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
        return layer.attn.project(layer.mixer_input(state.x), state.shared)

    def window(self, layer: nn.Module) -> int | None:
        mixer = cast(SambaYLayer, layer).attn
        return mixer.window if isinstance(mixer, SambaYAttention) else None
