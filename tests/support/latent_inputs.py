"""Random queries over a store of latents, and what the plain form gives for what the store reads back."""

import torch
from torch import Tensor

from diffquant.family.mask import Mask
from diffquant.kernels.cache.append import append
from diffquant.kernels.cache.kv_store import KVStore
from diffquant.recipe import Recipe
from tests.support.kernel_inputs import CAUSAL, expected

ROTATED, LATENT = 64, 512
# Of logits that differ by about one.
SCALE = (LATENT + ROTATED) ** -0.5


def random_latents(
    queries: int,
    keys: int,
    *,
    pairs: int = 4,
    noises: int = 1,
    batch: int = 1,
    dtype: torch.dtype = torch.float16,
    device: str = "cpu",
) -> tuple[list[Tensor], Tensor, Tensor, Tensor | None]:
    """Queries a map, the second's only where there are noise heads; turned channels, latents and λ."""
    generator = torch.Generator(device).manual_seed(0)

    def heads(count: int, length: int, width: int) -> Tensor:
        rows = torch.randn(batch, length, count, width, generator=generator, device=device)
        return rows.to(dtype).transpose(1, 2)

    q = [heads(count, queries, LATENT + ROTATED) for count in (pairs, noises) if count]
    lam = torch.rand(batch, pairs, queries, 1, generator=generator, device=device) if noises else None
    return q, heads(1, keys, ROTATED), heads(1, keys, LATENT), lam


def stored_latents(recipe: Recipe, turned: Tensor, latents: Tensor, capacity: int | None = None) -> KVStore:
    """A store that holds these, filled by a prompt and one token."""
    tokens = latents.shape[2]
    store = KVStore(recipe, turned, latents, capacity or tokens)
    last = max(tokens - 1, 1)
    for part in (slice(0, last), slice(last, None)):
        append(store, turned[:, :, part], latents[:, :, part])
    return store


def expected_latents(q: list[Tensor], store: KVStore, lam: Tensor | None, mask: Mask = CAUSAL) -> Tensor:
    """Weighted latents [B, h, T, c] of `naive` in float64."""
    turned, latents = store.read()
    keys = torch.cat([latents, turned], -1)
    return expected(q, [keys] * len(q), latents, lam, scale=SCALE, mask=mask)
