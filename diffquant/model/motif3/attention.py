"""Attention over latent keys and values. In Motif-3 it has 16 groups of four signal heads and one noise head."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from diffquant.attention.registry import LATENT
from diffquant.family.mask import Mask
from diffquant.kernels.arguments import MAX_QUERIES
from diffquant.model.attention import PairAttention, apply_rotary_embedding, clear_padded_keys, project_sigmoids
from diffquant.model.fused_cache import FusedLayer, latent_layer_refusal, warn_of_slow_decoding
from diffquant.model.linears import add_linears
from diffquant.model.motif3.blocks import LatentAttentionBlock
from diffquant.model.reading import Reading
from diffquant.recipe import Recipe
from diffquant.recipe.numbers.simulation import rotate_by

Rotary = tuple[Tensor, Tensor]


class LatentAttention(PairAttention):
    """Attention of a layer that caches per token a latent and the rotated key channels shared by all heads.

    It is computed in one of two equivalent forms. "Expanded" computes keys and values of each KV head from the latents.
    "Absorbed" maps queries to the latent space, where the latents are the keys and the values of all heads. The
    absorbed form is cheaper for few queries over many tokens.

    Shapes: as in `PairAttention`, with c = `block.latent` and r = `block.rope` channels.
    """

    wq_a: nn.Linear
    wq_b: nn.Linear
    wq_b_gate: nn.Linear
    wkv_a: nn.Linear
    wkv_b: nn.Linear
    lambda_proj: nn.Linear
    wo: nn.Linear

    def __init__(self, block: LatentAttentionBlock) -> None:
        super().__init__(block.spec, block.layer)
        self.block = block
        self.scale = block.spec.scale * block.scale_factor
        add_linears(self, block)
        self.q_norm = LlamaRMSNorm(block.query_latent, block.eps)
        self.kv_norm = LlamaRMSNorm(block.latent, block.eps)

    def forward(self, x: Tensor, rotary: Rotary, reading: Reading) -> Tensor:
        """Compute the output [B, T, D] for an input x [B, T, D].

        Args:
            x: hidden states.
            rotary: cos and sin, [B or 1, T, r] each.
            reading: masks and cache of the call.
        """
        query_latent, latent, rotated_keys = self.compute_latents(x, rotary)
        q = self.compute_queries(query_latent, rotary)
        mask = reading.mask(self.block.window)
        if self.key_rotation is not None:
            q = self.change_rotated(q, partial(rotate_by, matrix=self.key_rotation))
            rotated_keys = rotate_by(rotated_keys, self.key_rotation)
        lam = project_sigmoids(x, self.lambda_proj)
        y = None
        if reading.cache is not None:
            if self.value_rotation is not None:
                latent = rotate_by(latent, self.value_rotation)
            stored = clear_padded_keys(rotated_keys, mask), clear_padded_keys(latent, mask)
            y = self._decode_stored(q, stored, lam, mask, reading.cache)
            if y is None:
                rotated_keys, latent = reading.cache.update(*stored, self.layer, needed=reading.needed)
                if self.value_rotation is not None:
                    latent = rotate_by(latent, self.value_rotation.mT)
        if y is None and self._absorbs(x.shape[1], latent.shape[2]):
            y = self._attend_absorbed(q, rotated_keys, latent, lam, mask)
        elif y is None:
            y = self.attend(q, *self.expand_latents(rotated_keys, latent), lam, mask)
        out: Tensor = self.wo(y * self.wq_b_gate(query_latent).sigmoid())
        return out

    @property
    def call_backend(self) -> str:
        return "auto" if self.backend == LATENT else self.backend

    def compute_latents(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Compute query latents [B, T, width], key-value latents [B, 1, T, c] and rotated key channels [B, 1, T, r]."""
        latent, keys = self.wkv_a(x).split([self.block.latent, self.block.rope], -1)
        rotated_keys = apply_rotary_embedding(keys.unsqueeze(1), rotary, self.spec.rope)
        return self.q_norm(self.wq_a(x)), self.kv_norm(latent).unsqueeze(1), rotated_keys

    def compute_queries(self, query_latent: Tensor, rotary: Rotary) -> Tensor:
        """Compute queries [B, query heads, T, d] from query latents, signal heads before noise heads."""
        q = self.layout.view_queries(self.wq_b(query_latent))
        return self.change_rotated(q, lambda x: apply_rotary_embedding(x, rotary, self.spec.rope))

    def change_rotated(self, q: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Replace the rotated channels of queries [B, query heads, T, d], each head's last, by a function's result."""
        plain, rotated = q.split([self.block.unrotated_width, self.block.rope], -1)
        return torch.cat([plain, change(rotated)], -1)

    def expand_latents(self, rotated_keys: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Compute keys [B, h_kv, S, d] and values [B, h_kv, S, dv].

        Args:
            rotated_keys: rotated key channels [B, 1, S, r].
            latent: key-value latents [B, 1, S, c].
        """
        heads = self.wkv_b(latent.squeeze(1)).unflatten(-1, (self.spec.kv_pairs, -1)).transpose(1, 2)
        plain, values = heads.split([self.block.unrotated_width, self.spec.value_dim], -1)
        return torch.cat([plain, rotated_keys.expand(-1, self.spec.kv_pairs, -1, -1)], -1), values

    def project(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values, [B, heads, T, width] each.

        Queries are multiplied by the block's `scale_factor`.
        """
        query_latent, latent, rotated_keys = self.compute_latents(x, rotary)
        k, v = self.expand_latents(rotated_keys, latent)
        return self.compute_queries(query_latent, rotary) * self.block.scale_factor, k, v

    def _absorbs(self, queries: int, keys: int) -> bool:
        """Return whether the absorbed form is cheaper for these numbers of queries and keys, and allowed.

        It is not allowed without cached tokens, since calibration needs each Linear to run as a module, nor if maps or
        operands are quantized, which is defined for the expanded form.
        """
        if queries == keys or self.has_quantizers or not isinstance(self.wkv_b, nn.Linear):
            return False
        spec, block = self.spec, self.block
        more_of_a_map = 2 * block.latent + block.rope - spec.head_dim - spec.value_dim
        expansion = block.latent * spec.kv_pairs * (block.unrotated_width + spec.value_dim)
        return queries * spec.query_heads * more_of_a_map < expansion

    def _attend_absorbed(self, q: Tensor, rotated_keys: Tensor, latent: Tensor, lam: Tensor, mask: Mask) -> Tensor:
        keys = torch.cat([latent, rotated_keys], -1)
        # Both maps' outputs, and so their difference, are in the latent space.
        return self._to_values(self.attend(torch.cat(self._to_latent_space(q), 1), keys, latent, lam, mask))

    def _decode_stored(
        self, q: Tensor, stored: tuple[Tensor, Tensor], lam: Tensor, mask: Mask, cache: Cache
    ) -> Tensor | None:
        """Compute the output of a few new tokens with the kernel that decodes from stored latents.

        Returns None, with nothing stored, if this backend was not chosen or does not support these tokens.
        """
        if self.backend != LATENT:
            return None
        layer = cache.layers[self.layer]
        if not isinstance(layer, FusedLayer) or not layer.get_seq_length():
            return None
        from diffquant.kernels.cache.latent import decode_latent

        refusal = self.decoding_refusal(layer.recipe)
        if mask.keys is not None and mask.valid_ranges is None:
            refusal = "the padding mask has holes"
        if refusal is not None:
            warn_of_slow_decoding(refusal)
        if refusal is not None or q.shape[2] > MAX_QUERIES:
            return None
        maps, rotation = self._to_latent_space(q), self.value_rotation
        if rotation is not None:
            c = self.block.latent
            maps = [torch.cat([rotate_by(x[..., :c], rotation), x[..., c:]], -1) for x in maps]
        y = decode_latent(maps, layer.append(*stored), lam, scale=self.scale, mask=mask).to(q.dtype)
        return self._to_values((y if rotation is None else rotate_by(y, rotation.mT)).transpose(1, 2).flatten(2))

    def decoding_refusal(self, recipe: Recipe) -> str | None:
        """Return why no kernel decodes from latents stored under this recipe, or None."""
        if self.has_quantizers:
            return "logits, softmax weights or operands of attention are quantized, which needs dequantized latents"
        if not isinstance(self.wkv_b, nn.Linear):
            return "wkv_b is packed, but mapping queries to latents needs its 16-bit weight"
        if self.pair_norm_settings() is not None:
            return "pairs have a norm, which does not apply to latents"
        weight = self.wkv_b.weight
        return latent_layer_refusal(recipe, self.block.rope, self.block.latent, weight.dtype, weight.device)

    def _to_latent_space(self, q: Tensor) -> list[Tensor]:
        """Map queries to [B, heads, T, c + r] per map: unrotated channels to latent space, rotated ones unchanged."""
        maps = []
        for queries in self.layout.split_query_maps(q):
            grouped = queries.unflatten(1, (self.spec.kv_pairs, -1))
            within = grouped[..., : self.block.unrotated_width] @ self._per_head[0][:, None]
            maps.append(torch.cat([within, grouped[..., self.block.unrotated_width :]], -1).flatten(1, 2))
        return maps

    def _to_values(self, y: Tensor) -> Tensor:
        """Map attention outputs in latent space [B, T, h·c] to values [B, T, h·dv]."""
        latents = y.unflatten(-1, (self.spec.kv_pairs, -1, self.block.latent))
        out: Tensor = (latents @ self._per_head[1].mT).flatten(2)
        return out

    @property
    def _per_head(self) -> Sequence[Tensor]:
        """Weights of each head's unrotated keys [h_kv, plain, c] and values [h_kv, dv, c], applied to the latent."""
        per_head = self.wkv_b.weight.unflatten(0, (self.spec.kv_pairs, -1))
        parts: Sequence[Tensor] = per_head.split([self.block.unrotated_width, self.spec.value_dim], 1)
        return parts
