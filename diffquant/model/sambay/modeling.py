"""SambaY: the decoder of Phi-4-mini-flash-reasoning, the model with its head, and a walk through its layers.

Source: arXiv 2507.06607; the modelling code of microsoft/Phi-4-mini-flash-reasoning.
"""

from collections.abc import MutableSequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from torch.nn import LayerNorm
from transformers.cache_utils import Cache

from diffquant.errors import UsageError
from diffquant.family.mask import Mask
from diffquant.model.causal import CausalModel
from diffquant.model.config import ArchitectureConfig
from diffquant.model.decoder import Decoder
from diffquant.model.sambay.architecture import SambaYArchitecture
from diffquant.model.sambay.attention import SambaYAttention
from diffquant.model.sambay.cache import SambaYCache
from diffquant.model.sambay.config import SambaYConfig
from diffquant.model.sambay.layer import Flow, SambaYLayer, normed
from diffquant.model.sambay.reading import SambaYReading
from diffquant.model.walk import Walk
from diffquant.numbers.absmax import compute_dtype


class SambaYModel(Decoder):
    """The decoder without its head: embedding, layers, final norm."""

    config_class = SambaYConfig
    layer_class = SambaYLayer
    architecture: SambaYArchitecture
    final_layernorm: LayerNorm

    def __init__(self, config: ArchitectureConfig) -> None:
        super().__init__(config)
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
        reading = SambaYReading.of(mask.keys, x.shape[1], self.architecture.sliding_window, cache)
        flow = self.start(x)
        for layer in self.layers:
            if states is not None:
                states.append(flow.x)
            flow = layer(flow, reading)
        return normed(self.final_layernorm, flow.x)

    @staticmethod
    def start(x: Tensor) -> Flow:
        """The first layer's input, for embeddings [B, T, D]."""
        return Flow(x.to(compute_dtype(x)))

    def needs_own_cache(self, implementation: str | None) -> bool:  # noqa: ARG002  no other would hold the states
        return True

    @property
    def crop_refusal(self) -> str | None:
        return "Mamba's states and the windows of this model do not hold what was before"

    def new_cache(self) -> SambaYCache:
        """An empty cache as the recipe wants it."""
        return SambaYCache(self.recipe, self.architecture, self.ranges)


class SambaY(CausalModel):
    """A decoder-only language model of Mamba, windowed and shared differential attention."""

    config_class = SambaYConfig
    decoder_class = SambaYModel
    model: SambaYModel

    def walk(self, length: int) -> "SambaYWalk":
        return SambaYWalk(self, length)


@dataclass(frozen=True)
class SambaYWalk(Walk[Flow]):
    """A SambaY model's layers over sequences of one length."""

    model: SambaY

    def embed(self, ids: Tensor) -> Flow:
        return self.model.model.start(self.model.model.embed_tokens(ids))

    def hidden(self, state: Flow) -> Tensor:
        return state.x

    def run(self, layer: nn.Module, state: Flow) -> Flow:
        window = self.model.model.architecture.sliding_window
        cache = cast(SambaYCache | None, self.new_cache())
        out: Flow = layer(state, SambaYReading.of(None, self.length, window, cache))
        return out

    def project(self, layer: nn.Module, state: Flow) -> tuple[Tensor, Tensor, Tensor] | None:
        layer = cast(SambaYLayer, layer)
        if not isinstance(layer.attn, SambaYAttention):
            return None
        return layer.attn.project(layer.mixer_input(state.x), state.shared)

    def attention_output(self, layer: nn.Module) -> nn.Module | None:
        mixer = cast(SambaYLayer, layer).attn
        return mixer.out_proj if isinstance(mixer, SambaYAttention) else None

    def window(self, layer: nn.Module) -> int | None:
        mixer = cast(SambaYLayer, layer).attn
        return mixer.window if isinstance(mixer, SambaYAttention) else None
