"""Attention over latent keys and values: 16 groups of four signal maps and one noise map in Motif-3."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from diffquant.attention.registry import LATENT
from diffquant.family.mask import Mask
from diffquant.model.attention import PairAttention, rotate, sigmoids, without_padding
from diffquant.model.fused_cache import FusedLayer, latent_layer_refusal, warn_of_slow_decoding
from diffquant.model.linears import add_linears
from diffquant.model.motif3.blocks import LatentAttentionBlock
from diffquant.model.reading import Reading
from diffquant.numbers.rotation import rotated
from diffquant.recipe import Recipe

Rotary = tuple[Tensor, Tensor]


class LatentAttention(PairAttention):
    """Attention of a layer that keeps a latent of each token, and the turned channels that all its keys share.

    It reads them in one of two forms, which compute the same: `expanded` into keys and values of each KV head, or
    `absorbed`, where queries go into the latent's space and one head of keys, which are also values, serves them all.
    Few queries over many tokens are cheaper in the second.
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
        """Output [B, T, D] for an input x [B, T, D]; `rotary` is cos and sin, [B or 1, T, rope]."""
        query_latent, latent, turned = self.latents(x, rotary)
        q = self.queries(query_latent, rotary)
        mask = reading.mask(self.block.window)
        if self.key_rotation is not None:
            q = torch.cat([q[..., : self.block.plain], rotated(q[..., self.block.plain :], self.key_rotation)], -1)
            turned = rotated(turned, self.key_rotation)
        lam = sigmoids(x, self.lambda_proj)
        y = None
        if reading.cache is not None:
            if self.value_rotation is not None:
                latent = rotated(latent, self.value_rotation)
            stored = without_padding(turned, mask), without_padding(latent, mask)
            y = self._decoded(q, stored, lam, mask, reading.cache)
            if y is None:
                turned, latent = reading.cache.update(*stored, self.layer, needed=reading.needed)
                if self.value_rotation is not None:
                    latent = rotated(latent, self.value_rotation.mT)
        if y is None:
            attended = self._absorbed if self._absorbs(x.shape[1], latent.shape[2]) else self._expanded
            y = attended(q, turned, latent, lam, mask)
        out: Tensor = self.wo(y * self.wq_b_gate(query_latent).sigmoid())
        return out

    @property
    def calls_backend(self) -> str:
        return "auto" if self.backend == LATENT else self.backend

    def latents(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Latent of the queries [B, T, q], latent of keys and values [B, 1, T, c], and turned channels [B, 1, T, r]."""
        latent, turned = self.wkv_a(x).split([self.block.latent, self.block.rope], -1)
        latent, turned = self.kv_norm(latent).unsqueeze(1), rotate(turned.unsqueeze(1), rotary, self.spec.rope)
        return self.q_norm(self.wq_a(x)), latent, turned

    def queries(self, query_latent: Tensor, rotary: Rotary) -> Tensor:
        """Queries [B, query heads, T, d], signal heads before noise heads."""
        q = self.layout.queries(self.wq_b(query_latent))
        return torch.cat([q[..., : self.block.plain], rotate(q[..., self.block.plain :], rotary, self.spec.rope)], -1)

    def expand(self, turned: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [B, h_kv, S, d] and values [B, h_kv, S, dv] of turned channels and latents."""
        heads = self.wkv_b(latent.squeeze(1)).unflatten(-1, (self.spec.kv_pairs, -1)).transpose(1, 2)
        plain, values = heads.split([self.block.plain, self.spec.value_dim], -1)
        return torch.cat([plain, turned.expand(-1, self.spec.kv_pairs, -1, -1)], -1), values

    def project(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [B, heads, T, width] each; queries with the factor of the layer's logits."""
        query_latent, latent, turned = self.latents(x, rotary)
        return self.queries(query_latent, rotary) * self.block.scale_factor, *self.expand(turned, latent)

    def _absorbs(self, queries: int, keys: int) -> bool:
        """Whether this many queries read this many keys in the latent's space.

        Without a past all of a layer's matrices run as modules, which a rounding's passes over the layers rely on; and
        where something of the maps is rounded, they are those of one form.
        """
        rounds = self.rounds or self.calls is not None
        if queries == keys or rounds or not isinstance(self.wkv_b, nn.Linear):
            return False
        spec, block = self.spec, self.block
        more_of_a_map = 2 * block.latent + block.rope - spec.head_dim - spec.value_dim
        expansion = block.latent * spec.kv_pairs * (block.plain + spec.value_dim)
        return queries * spec.query_heads * more_of_a_map < expansion

    def _expanded(self, q: Tensor, turned: Tensor, latent: Tensor, lam: Tensor, mask: Mask) -> Tensor:
        return self.attend(q, *self.expand(turned, latent), lam, mask)

    def _absorbed(self, q: Tensor, turned: Tensor, latent: Tensor, lam: Tensor, mask: Mask) -> Tensor:
        keys = torch.cat([latent, turned], -1)
        # Both maps' results lie in the latent's space, and so does their difference.
        return self._raised(self.attend(torch.cat(self._within(q), 1), keys, latent, lam, mask))

    def _decoded(
        self, q: Tensor, stored: tuple[Tensor, Tensor], lam: Tensor, mask: Mask, cache: Cache
    ) -> Tensor | None:
        """Output of a few tokens after others, which are stored, by the kernel that reads the latents as they are.

        None, with nothing stored, where it was not asked for by name, or does not serve these tokens.
        """
        if self.backend != LATENT:
            return None
        layer = cache.layers[self.layer]
        if not isinstance(layer, FusedLayer) or not layer.get_seq_length():
            return None
        from diffquant.kernels.cache.decode import MAX_QUERIES
        from diffquant.kernels.cache.latent import decode_latent

        refusal = self.decoding_refusal(layer.recipe)
        if mask.keys is not None and mask.ranges is None:
            refusal = "the padding mask has holes"
        if refusal is not None:
            warn_of_slow_decoding(refusal)
        if refusal is not None or q.shape[2] > MAX_QUERIES or self.calls is not None:
            return None
        maps, rotation = self._within(q), self.value_rotation
        if rotation is not None:
            c = self.block.latent
            maps = [torch.cat([rotated(x[..., :c], rotation), x[..., c:]], -1) for x in maps]
        y = decode_latent(maps, layer.append(*stored), lam, scale=self.scale, mask=mask).to(q.dtype)
        return self._raised((y if rotation is None else rotated(y, rotation.mT)).transpose(1, 2).flatten(2))

    def decoding_refusal(self, recipe: Recipe) -> str | None:
        """Reason why no kernel decodes from latents that are stored under the layer's recipe, or None."""
        if self.rounds:
            return "logits, softmax weights or operands of attention are rounded, for which latents are read back"
        if not isinstance(self.wkv_b, nn.Linear):
            return "wkv_b is packed, and queries reach the latents' space by its 16-bit weight"
        if self.post() is not None:
            return "pairs have a norm, which is not one of latents"
        weight = self.wkv_b.weight
        return latent_layer_refusal(recipe, self.block.rope, self.block.latent, weight.dtype, weight.device)

    def _within(self, q: Tensor) -> list[Tensor]:
        """Queries [B, heads, T, c + r] of each map, those of plain channels in the latent's space."""
        maps = []
        for queries in self.layout.query_maps(q):
            grouped = queries.unflatten(1, (self.spec.kv_pairs, -1))
            within = grouped[..., : self.block.plain] @ self._per_head[0][:, None]
            maps.append(torch.cat([within, grouped[..., self.block.plain :]], -1).flatten(1, 2))
        return maps

    def _raised(self, y: Tensor) -> Tensor:
        """Heads' values [B, T, h·dv] of weighted latents [B, T, h·c]."""
        latents = y.unflatten(-1, (self.spec.kv_pairs, -1, self.block.latent))
        out: Tensor = (latents @ self._per_head[1].mT).flatten(2)
        return out

    @property
    def _per_head(self) -> Sequence[Tensor]:
        """Of a head's keys and of its values the rows that make them of the latent, [h_kv, plain or dv, c]."""
        per_head = self.wkv_b.weight.unflatten(0, (self.spec.kv_pairs, -1))
        parts: Sequence[Tensor] = per_head.split([self.block.plain, self.spec.value_dim], 1)
        return parts
