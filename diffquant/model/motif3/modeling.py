"""Motif-3: the decoder, the model with its head, and a walk through its layers."""

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from diffquant.attention.registry import LATENT
from diffquant.errors import UsageError
from diffquant.family.mask import Mask
from diffquant.model.blocks import TokenRows
from diffquant.model.cache import PackedLayer
from diffquant.model.causal import CausalModel
from diffquant.model.config import ArchitectureConfig
from diffquant.model.decoder import Decoder, DecoderLayer
from diffquant.model.fused_cache import FusedLayer, warn_of_slow_decoding
from diffquant.model.motif3.architecture import Motif3Architecture
from diffquant.model.motif3.attention import LatentAttention, Rotary
from diffquant.model.motif3.rotary import rotary_tables
from diffquant.model.motif3.streams import Streams, written
from diffquant.model.positions import count_positions
from diffquant.model.reading import Reading
from diffquant.model.walk import Walk
from diffquant.model.windowed_cache import WindowsCache, storage_of


class Motif3Config(ArchitectureConfig, architecture=Motif3Architecture):
    """The fields by the names that Motif-3's config.json has for them."""

    model_type = "Motif"


class Motif3Layer(DecoderLayer):
    """Attention and a network, each between gates on the residual streams [B, T, E, D] and behind its norm."""

    self_attn: LatentAttention
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    mhc_attn: Streams
    mhc_ffn: Streams

    @property
    def network(self) -> nn.Module:
        return self.get_submodule("moe" if hasattr(self, "moe") else "mlp")

    def forward(self, x: Tensor, rotary: Rotary, reading: Reading) -> Tensor:
        read, mixed, writes = self.mhc_attn(x)
        x = written(mixed, self.self_attn(self.input_layernorm(read), rotary, reading), writes)
        read, mixed, writes = self.mhc_ffn(x)
        return written(mixed, self.network(self.post_attention_layernorm(read)), writes)

    def project(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the attention, for streams x."""
        read, _, _ = self.mhc_attn(x)
        return self.self_attn.project(self.input_layernorm(read), rotary)

    def cached(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """The turned channels and the latent that a cache keeps, for streams x."""
        read, _, _ = self.mhc_attn(x)
        _, latent, turned = self.self_attn.latents(self.input_layernorm(read), rotary)
        return turned, latent


class Motif3Model(Decoder):
    """The decoder without its head: embedding, layers over residual streams, their mean and the final norm."""

    config_class = Motif3Config
    layer_class = Motif3Layer
    architecture: Motif3Architecture
    norm: nn.Module

    def __init__(self, config: ArchitectureConfig) -> None:
        super().__init__(config)
        self.post_init()

    def run_layers(
        self,
        x: Tensor,
        mask: Mask,
        past: int,
        position_ids: Tensor | None,
        cache: Cache | None,
        states: MutableSequence[Tensor] | None,
    ) -> Tensor:
        """As `Decoder.run_layers`.

        Raises:
            UsageError: the cache is not the model's own, or the mask is another than causal order with padding.
        """
        if mask.seen is not None:
            raise UsageError(
                "this model has windows beside causal order: neither a 4-D attention_mask nor sequences packed by "
                "position_ids can be honoured; pass sequences as rows of a batch, and an attention_mask [batch, tokens]"
            )
        if cache is not None and not isinstance(cache, WindowsCache):
            raise UsageError(f"{type(cache).__name__} does not keep latents of windows; pass what new_cache() gives")
        if position_ids is None:
            position_ids = count_positions(mask.keys, past, x.shape[1], x.device)
        tables = self.tables(position_ids, x)
        reading = Reading.of(mask.keys, x.shape[1], self.architecture.seen, cache)
        streams = self.start(x)
        for layer, rotary in zip(self.layers, tables, strict=True):
            if states is not None:
                states.append(streams.mean(-2))
            streams = layer(streams, rotary, reading)
        normed: Tensor = self.norm(streams.mean(-2))
        return normed

    def start(self, x: Tensor) -> Tensor:
        """Streams [B, T, E, D] of the first layer, for embeddings [B, T, D]."""
        return x.unsqueeze(-2).expand(-1, -1, self.architecture.mhc_expansion_rate, -1)

    def tables(self, positions: Tensor, like: Tensor) -> Sequence[Rotary]:
        """Cosines and sines for each layer."""
        of_layers = [layer.self_attn.block.frequencies for layer in cast(Sequence[Motif3Layer], self.layers)]
        by_frequencies = {each: rotary_tables(positions, each, like) for each in dict.fromkeys(of_layers)}
        return [by_frequencies[each] for each in of_layers]

    def needs_own_cache(self, implementation: str | None) -> bool:  # noqa: ARG002  no other keeps windows
        return True

    @property
    def crop_refusal(self) -> str | None:
        return None if self.architecture.seen is None else "the windows of this model do not hold what was before"

    def new_cache(self) -> WindowsCache:
        """An empty cache of latents as the recipe wants it."""
        rows = self.architecture.token_rows
        layers = [self._storage(layer, each) for layer, each in rows.items()]
        windowed = next((layer for layer, each in rows.items() if each.window is not None), None)
        return WindowsCache(self.recipe, layers, whole=0, windowed=windowed)

    def _storage(self, layer: int, rows: TokenRows) -> PackedLayer:
        attention = cast(Motif3Layer, self.layers[layer]).self_attn
        # The kernel has no backward pass, and a window is short.
        if attention.backend == LATENT and rows.window is None and not torch.is_grad_enabled():
            recipe = self.recipe.at_layer(layer)
            if (refusal := attention.decoding_refusal(recipe)) is None:
                return FusedLayer(recipe, None)
            warn_of_slow_decoding(refusal)
        return storage_of(rows, layer, self.recipe, self.ranges)


class Motif3(CausalModel):
    """A decoder-only language model of latent attention and experts between residual streams."""

    config_class = Motif3Config
    decoder_class = Motif3Model
    model: Motif3Model

    def walk(self, length: int) -> "Motif3Walk":
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        positions = torch.arange(length, device=self.device)[None]
        return Motif3Walk(self, length, self.model.tables(positions, like))


@dataclass(frozen=True)
class Motif3Walk(Walk[Tensor]):
    """A Motif-3's layers over sequences of one length; what goes from layer to layer is the streams [B, T, E, D].

    Attributes:
        tables: cosines and sines for each layer.
    """

    model: Motif3
    tables: Sequence[Rotary]

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.model.start(self.model.model.embed_tokens(ids))

    def hidden(self, state: Tensor) -> Tensor:
        return state.mean(-2)

    def run(self, layer: nn.Module, state: Tensor) -> Tensor:
        layer, window = cast(Motif3Layer, layer), self.model.model.architecture.seen
        cache = cast(WindowsCache | None, self.new_cache())
        out: Tensor = layer(state, self.tables[layer.layer], Reading.of(None, self.length, window, cache))
        return out

    def project(self, layer: nn.Module, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layer = cast(Motif3Layer, layer)
        return layer.project(state, self.tables[layer.layer])

    def cached(
        self,
        layer: nn.Module,
        state: Tensor,
        projections: tuple[Tensor, Tensor, Tensor],  # noqa: ARG002  expanded
    ) -> tuple[Tensor, Tensor]:
        layer = cast(Motif3Layer, layer)
        return layer.cached(state, self.tables[layer.layer])

    def attention_output(self, layer: nn.Module) -> nn.Module:
        return cast(Motif3Layer, layer).self_attn.wo

    def window(self, layer: nn.Module) -> int | None:
        return cast(Motif3Layer, layer).self_attn.block.window
