"""Motif-3: its layers, its decoder and the model with its output head."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers.cache_utils import Cache

from diffquant.attention.registry import LATENT
from diffquant.errors import UsageError
from diffquant.family.mask import Mask
from diffquant.model.blocks import CachedShapes
from diffquant.model.cache import PackedLayer
from diffquant.model.causal import CausalModel
from diffquant.model.config import ArchitectureConfig
from diffquant.model.decoder import Decoder, DecoderLayer
from diffquant.model.fused_cache import FusedLayer, warn_of_slow_decoding
from diffquant.model.linears import compute_projection
from diffquant.model.motif3.architecture import Motif3Architecture, rotary_tables
from diffquant.model.motif3.attention import LatentAttention, Rotary
from diffquant.model.motif3.blocks import StreamGatesBlock
from diffquant.model.reading import Reading, compute_positions
from diffquant.model.windowed_cache import MixedCache, create_storage
from diffquant.recipe.numbers.absmax import computing_dtype

EPS = 1e-6
LARGEST_GATE, LARGEST_MIX = 10.0, 20.0
SMALLEST_SUM = 1e-8


class StreamGates(nn.Module):
    """The gates that connect a sublayer to the E residual streams [B, T, E, D], computed in at least float32.

    Each token's gates depend on all its streams.
    """

    def __init__(self, block: StreamGatesBlock) -> None:
        super().__init__()
        self.block = block
        width = block.streams * block.width
        self.rms_norm = nn.RMSNorm(width, EPS)
        for name, shape in block.gate_shapes.items():
            self.add_module(f"proj_{name}", nn.Linear(width, torch.Size(shape).numel(), bias=False))
            self.register_parameter(f"alpha_{name}", nn.Parameter(torch.zeros(1)))
            self.register_parameter(f"bias_{name}", nn.Parameter(torch.zeros(shape)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute how a sublayer reads from the residual streams x [B, T, E, D] and writes to them.

        Returns:
            input of the sublayer, a weighted sum of the streams [B, T, D].
            mixed streams [B, T, E, D], to which the sublayer's output is added.
            factors [B, T, E] of the sublayer's output, one for each stream.
        """
        wide = x.to(computing_dtype(x))
        flat = wide.flatten(-2)
        n = rms_norm(flat, flat.shape[-1:], self.rms_norm.weight.to(flat.dtype), EPS)
        reads = self._gate("pre", n, LARGEST_GATE).sigmoid()
        writes = self._gate("post", n, LARGEST_GATE).sigmoid() * self.block.post_scale
        mix = sinkhorn_normalize(self._gate("res", n, LARGEST_MIX).exp(), self.block.rounds)
        return (reads[..., None] * wide).sum(-2).to(x.dtype), mix @ wide, writes

    def _gate(self, name: str, n: Tensor, largest: float) -> Tensor:
        """Compute the gate's logits α · projection + bias, [B, T, *shape], clipped to ±`largest`."""
        alpha, bias = (self.get_parameter(f"{each}_{name}").to(n.dtype) for each in ("alpha", "bias"))
        projected = compute_projection(n, self.get_submodule(f"proj_{name}"), n.dtype)
        raw: Tensor = projected.unflatten(-1, self.block.gate_shapes[name])
        return (alpha * raw + bias).clamp(-largest, largest)


def sinkhorn_normalize(mix: Tensor, iterations: int) -> Tensor:
    """Normalize positive matrices [..., E, E] by repeatedly dividing rows, then columns, by their sums.

    Source: Sinkhorn and Knopp, 1967.
    """
    for _ in range(iterations):
        mix = mix / mix.sum(-1, keepdim=True).clamp(min=SMALLEST_SUM)
        mix = mix / mix.sum(-2, keepdim=True).clamp(min=SMALLEST_SUM)
    return mix


def add_to_streams(mixed: Tensor, y: Tensor, writes: Tensor) -> Tensor:
    """Add a sublayer's output to the mixed residual streams.

    Args:
        mixed: mixed streams [B, T, E, D].
        y: output of the sublayer [B, T, D].
        writes: factor of y for each stream, [B, T, E].

    Returns:
        The streams [B, T, E, D] in y's dtype.
    """
    return (mixed + writes[..., None] * y.to(mixed.dtype)[..., None, :]).to(y.dtype)


class Motif3Config(ArchitectureConfig, architecture=Motif3Architecture):
    """Configuration of a Motif-3 model, with fields named as in its config.json."""

    model_type = "Motif"


class Motif3Layer(DecoderLayer):
    """Attention and an MLP, each preceded by a norm and connected to the residual streams [B, T, E, D] by gates."""

    self_attn: LatentAttention
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    mhc_attn: StreamGates
    mhc_ffn: StreamGates

    @property
    def network(self) -> nn.Module:
        return self.get_submodule("moe" if hasattr(self, "moe") else "mlp")

    def forward(self, x: Tensor, rotary: Rotary, reading: Reading) -> Tensor:
        read, mixed, writes = self.mhc_attn(x)
        x = add_to_streams(mixed, self.self_attn(self.input_layernorm(read), rotary, reading), writes)
        read, mixed, writes = self.mhc_ffn(x)
        return add_to_streams(mixed, self.network(self.post_attention_layernorm(read)), writes)

    def project(self, state: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        read, _, _ = self.mhc_attn(state)
        return self.self_attn.project(self.input_layernorm(read), arguments[0])

    def cached_latents(self, state: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Compute the rotated key channels and latents that are cached, from the residual streams."""
        read, _, _ = self.mhc_attn(state)
        _, latent, rotated_keys = self.self_attn.compute_latents(self.input_layernorm(read), arguments[0])
        return rotated_keys, latent

    @property
    def window(self) -> int | None:  # type: ignore[override]
        return self.self_attn.block.window


class Motif3Model(Decoder):
    """The decoder without its output head: embedding, layers, mean of the residual streams, final norm."""

    config_class = Motif3Config
    layer_class = Motif3Layer
    architecture: Motif3Architecture
    norm: nn.Module

    def layer_arguments(
        self, x: Tensor, mask: Mask, past: int, position_ids: Tensor | None, cache: Cache | None
    ) -> Sequence[tuple[Any, ...]]:
        if mask.explicit is not None:
            raise UsageError(
                "this model has windowed layers: neither a 4-D attention_mask nor sequences packed by "
                "position_ids are supported; pass sequences as rows of a batch, and an attention_mask [batch, tokens]"
            )
        if cache is not None and not isinstance(cache, MixedCache):
            raise UsageError(f"{type(cache).__name__} cannot store windowed latents; pass the result of new_cache()")
        if position_ids is None:
            position_ids = compute_positions(mask.keys, past, x.shape[1], x.device)
        reading = Reading.of(mask.keys, x.shape[1], self.architecture.window, cache)
        return [(rotary, reading) for rotary in self.layer_rotary_tables(position_ids, x)]

    def initial_state(self, x: Tensor) -> Tensor:
        """Return the first layer's residual streams [B, T, E, D]: E copies of the embeddings [B, T, D]."""
        return x.unsqueeze(-2).expand(-1, -1, self.architecture.mhc_expansion_rate, -1)

    def hidden_states(self, state: Tensor) -> Tensor:
        return state.mean(-2)

    def layer_rotary_tables(self, positions: Tensor, like: Tensor) -> Sequence[Rotary]:
        """Compute RoPE cosines and sines for each layer, in the dtype of `like`."""
        of_layers = [layer.self_attn.block.frequencies for layer in cast(Sequence[Motif3Layer], self.layers)]
        by_frequencies = {each: rotary_tables(positions, each, like) for each in dict.fromkeys(of_layers)}
        return [by_frequencies[each] for each in of_layers]

    def needs_own_cache(self, implementation: str | None) -> bool:  # noqa: ARG002  no other keeps windows
        return True

    @property
    def crop_refusal(self) -> str | None:
        return None if self.architecture.window is None else "this model's windowed layers do not keep earlier tokens"

    def new_cache(self) -> MixedCache:
        """Return a new empty cache of latents for the recipe."""
        rows = self.architecture.cached_shapes.items()
        return MixedCache(self.recipe, [self._storage(layer, each) for layer, each in rows])

    def _storage(self, layer: int, rows: CachedShapes) -> PackedLayer:
        attention = cast(Motif3Layer, self.layers[layer]).self_attn
        # The kernel has no backward pass, and windowed layers have too few tokens to gain from it.
        if attention.backend == LATENT and rows.window is None and not torch.is_grad_enabled():
            recipe = self.recipe.at_layer(layer)
            if (refusal := attention.decoding_refusal(recipe)) is None:
                return FusedLayer(recipe)
            warn_of_slow_decoding(refusal)
        return create_storage(rows, layer, self.recipe, self.ranges)


class Motif3(CausalModel):
    """A decoder-only language model with latent attention, mixture-of-experts layers and several residual streams."""

    config_class = Motif3Config
    decoder_class = Motif3Model
    model: Motif3Model
