"""Decoding from a store of latents on a CUDA device, against the plain form in float64."""

from dataclasses import replace

import pytest
import torch

from diffquant.family.mask import Mask
from diffquant.kernels.arguments import empty_output
from diffquant.kernels.cache import latent as module
from diffquant.kernels.cache.append import append
from diffquant.kernels.cache.latent import decode_latent
from diffquant.recipe import Recipe
from tests.support.kernel_inputs import padding, relative_error
from tests.support.latent_inputs import SCALE, expected_latents, random_latents, stored_latents

DEVICE = "cuda"
LIMITS = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
RECIPES = [
    Recipe.of(),
    Recipe.of(kv=8),
    Recipe.of(kv=4),
    Recipe.of(k="4:c64", v=4, residual=64),
    Recipe.of(k="6:c16", v=6, residual=5),
    Recipe.of(k=16, v=8),
]

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    monkeypatch.setattr(module, "empty_output", lambda q, width: empty_output(q, width).fill_(torch.nan))


def check(recipe, call, mask=None):
    q, turned, latents, lam = call
    mask = mask or Mask()
    store = stored_latents(recipe, turned, latents)
    out = decode_latent(q, store, lam, scale=SCALE, mask=mask)
    assert relative_error(out, expected_latents(q, store, lam, mask)) <= LIMITS[latents.dtype]


@pytest.mark.parametrize("dtype", list(LIMITS), ids=str)
@pytest.mark.parametrize(
    ("keys", "pairs", "noises"), [(70, 4, 1), (70, 64, 16), (5000, 64, 16), (300, 128, 0)], ids=str
)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda x: f"{x.k}-{x.v}-{x.residual}")
def test_equals_the_plain_form(recipe, keys, pairs, noises, dtype):
    check(recipe, random_latents(1, keys, pairs=pairs, noises=noises, dtype=dtype, device=DEVICE))


@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("keys", [1, 100])
def test_chunks_of_ragged_sequences_see_a_window(keys, window):
    mask = padding(keys, starts=[0, keys * 7 // 10], ends=[max(keys - 1, 1), keys], device=DEVICE)
    call = random_latents(3, keys, batch=2, dtype=torch.bfloat16, device=DEVICE)
    check(RECIPES[3], call, replace(mask, window=window))


@pytest.mark.parametrize("recipe", RECIPES[1:4:2], ids=["8", "4"])
def test_a_captured_step_is_valid_while_the_store_fills(recipe):
    q, turned, latents, lam = random_latents(1, 80, dtype=torch.float16, device=DEVICE)
    store = stored_latents(recipe, turned[:, :, :75], latents[:, :, :75], capacity=80)
    new = turned[:, :, 75:76].clone(), latents[:, :, 75:76].clone()

    def step():
        append(store, *new)
        return decode_latent(q, store, lam, scale=SCALE)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    store.length = 76
    for token in range(76, 80):
        new[0].copy_(turned[:, :, token : token + 1])
        new[1].copy_(latents[:, :, token : token + 1])
        graph.replay()
        store.length = token + 1
        assert relative_error(out, expected_latents(q, store, lam)) <= LIMITS[torch.float16]
