"""SambaY, the architecture of Phi-4-mini-flash-reasoning: its decoder and the model with its output head.

Source: arXiv 2507.06607; the modelling code of microsoft/Phi-4-mini-flash-reasoning.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import LayerNorm
from transformers.cache_utils import Cache

from diffquant.errors import UsageError
from diffquant.family.mask import Mask
from diffquant.model.blocks import CachedShapes
from diffquant.model.causal import CausalModel
from diffquant.model.decoder import Decoder
from diffquant.model.reading import Reading
from diffquant.model.sambay.architecture import SambaYArchitecture
from diffquant.model.sambay.config import SambaYConfig
from diffquant.model.sambay.layers import LayerState, SambaYLayer, layer_norm
from diffquant.model.windowed_cache import MixedCache, RecurrentLayer, create_storage
from diffquant.recipe.numbers.absmax import computing_dtype


class SambaYModel(Decoder):
    """The decoder without its output head: embedding, layers, final norm."""

    config_class = SambaYConfig
    layer_class = SambaYLayer
    architecture: SambaYArchitecture
    final_layernorm: LayerNorm

    def layer_arguments(
        self,
        x: Tensor,
        mask: Mask,
        past: int,  # noqa: ARG002  the model uses no positions
        position_ids: Tensor | None,  # noqa: ARG002
        cache: Cache | None,
    ) -> Sequence[tuple[Any, ...]]:
        if mask.explicit is not None:
            raise UsageError(
                "Mamba's layers read tokens one after the other: neither a 4-D attention_mask nor sequences packed by "
                "position_ids are supported; pass sequences as rows of a batch, and an attention_mask [batch, tokens]"
            )
        if cache is not None and not isinstance(cache, MixedCache):
            raise UsageError(f"{type(cache).__name__} does not hold Mamba's states; pass the result of new_cache()")
        reading = Reading.of(mask.keys, x.shape[1], self.architecture.sliding_window, cache)
        return [(reading,)] * len(self.layers)

    def initial_state(self, x: Tensor) -> LayerState:
        return LayerState(x.to(computing_dtype(x)))

    def hidden_states(self, state: LayerState) -> Tensor:
        return state.x

    def normalize(self, x: Tensor) -> Tensor:
        return layer_norm(self.final_layernorm, x)

    def needs_own_cache(self, implementation: str | None) -> bool:  # noqa: ARG002  no other would hold the states
        return True

    @property
    def crop_refusal(self) -> str | None:
        return "Mamba's states and this model's windowed layers do not keep earlier tokens"

    def new_cache(self) -> MixedCache:
        """Return a new empty cache for the recipe, with storage for the layers that cache something."""
        stored = enumerate(blocks["attn"].cached_shapes for blocks in self.architecture.layers)
        layers = [
            create_storage(kept, layer, self.recipe, self.ranges)
            if isinstance(kept, CachedShapes)
            else RecurrentLayer()
            for layer, kept in stored
            if kept is not None
        ]
        return MixedCache(self.recipe, layers)


class SambaY(CausalModel):
    """A decoder-only language model with Mamba, gated memory units and differential attention."""

    config_class = SambaYConfig
    decoder_class = SambaYModel
    model: SambaYModel
