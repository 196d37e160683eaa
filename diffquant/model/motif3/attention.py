"""Attention over latent keys and values: 16 groups of four signal maps and one noise map in Motif-3."""

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from diffquant.family.mask import Mask
from diffquant.model.attention import PairAttention, rotate, sigmoids, without_padding
from diffquant.model.linears import add_linears
from diffquant.model.motif3.blocks import LatentAttentionBlock
from diffquant.model.reading import Reading
from diffquant.numbers.rotation import rotated

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
        if reading.cache is not None:
            if self.value_rotation is not None:
                latent = rotated(latent, self.value_rotation)
            stored = without_padding(turned, mask), without_padding(latent, mask)
            turned, latent = reading.cache.update(*stored, self.layer, needed=reading.needed)
            if self.value_rotation is not None:
                latent = rotated(latent, self.value_rotation.mT)
        lam = sigmoids(x, self.lambda_proj.weight)
        attended = self._absorbed if self._absorbs(x.shape[1], latent.shape[2]) else self._expanded
        y = attended(q, turned, latent, lam, mask)
        out: Tensor = self.wo(y * self.wq_b_gate(query_latent).sigmoid())
        return out

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
        spec, block = self.spec, self.block
        # [h_kv, plain or dv, c]: of a head's keys and values the rows that make them of the latent.
        per_head = self.wkv_b.weight.unflatten(0, (spec.kv_pairs, -1))
        to_keys, to_values = per_head.split([block.plain, spec.value_dim], 1)
        maps = []
        for queries in self.layout.query_maps(q):
            grouped = queries.unflatten(1, (spec.kv_pairs, -1))
            within = grouped[..., : block.plain] @ to_keys[:, None]
            maps.append(torch.cat([within, grouped[..., block.plain :]], -1).flatten(1, 2))
        keys = torch.cat([latent, turned], -1)
        # Both maps' results lie in the latent's space, and so does their difference.
        y = self.attend(torch.cat(maps, 1), keys, latent, lam, mask)
        out: Tensor = (y.unflatten(-1, (spec.kv_pairs, -1, block.latent)) @ to_values.mT).flatten(2)
        return out
