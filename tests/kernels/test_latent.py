"""Decoding from a store of latents, interpreted, against the plain form in float64 over what the store reads back."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from diffquant.errors import UsageError
from diffquant.family.mask import Mask
from diffquant.kernels.arguments import empty_output
from diffquant.kernels.cache import latent as module
from diffquant.kernels.cache.append import append
from diffquant.kernels.cache.decode import decode
from diffquant.kernels.cache.kv_store import KVStore
from diffquant.kernels.cache.latent import decode_latent
from diffquant.kernels.configs import override_configs
from diffquant.recipe import Recipe
from tests.support.kernel_inputs import padding, random_call, relative_error
from tests.support.latent_inputs import SCALE, expected_latents, random_latents, stored_latents
from tests.support.tables import in_one_test
from tests.support.thorough import sampled

LIMIT = 2e-3
K4V4 = Recipe.of(k="4:c32", v=4, residual=20)
RECIPES = [
    Recipe.of(),
    Recipe.of(kv=8),
    Recipe.of(kv=4),
    K4V4,
    Recipe.of(k=16, v=8),
    Recipe.of(k="6:c16", v="6", residual=5),
    Recipe.of(k=8, v=4, residual=33),
    Recipe.of(k="8:c64", v=16),
]


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    monkeypatch.setattr(module, "empty_output", lambda q, width: empty_output(q, width).fill_(torch.nan))


def check(recipe, call, *, mask=None, limit=LIMIT, store=None):
    q, turned, latents, lam = call
    mask = mask or Mask()
    store = store or stored_latents(recipe, turned, latents)
    out = decode_latent(q, store, lam, scale=SCALE, mask=mask)
    wanted = expected_latents(q, store, lam, mask)
    assert out.shape == wanted.shape
    assert relative_error(out, wanted) <= limit
    return out


# Each recipe and each number of noise heads is in every fourth of their pairs.
@pytest.mark.parametrize(
    ("recipe", "noises"),
    sampled(product(RECIPES, [0, 1, 4]), 4),
    ids=lambda x: x if isinstance(x, int) else f"{x.k}-{x.v}-{x.residual}",
)
def test_equals_the_plain_form(recipe, noises):
    check(recipe, random_latents(1, 129, noises=noises))


@pytest.mark.parametrize(
    ("keys", "queries", "mask"),
    [
        (100, 3, Mask()),
        (1, 1, Mask()),
        (5, 9, Mask()),
        (80, 2, padding(80, starts=[0, 41])),
        (64, 5, padding(64, starts=[60, 62])),
        (17, 1, padding(17, starts=[17, 3])),
        (40, 6, padding(40, starts=[3, 0], ends=[40, 37])),
        (130, 2, Mask(window=40)),
        (100, 1, Mask(window=1)),
        (100, 3, replace(padding(100, starts=[0, 70], ends=[99, 100]), window=33)),
    ],
    ids=[
        "chunk",
        "one key",
        "more queries than keys",
        "left padding",
        "padded queries",
        "nothing to see",
        "ragged",
        "window",
        "window of its own key",
        "ragged window",
    ],
)
def test_what_a_query_sees(keys, queries, mask):
    check(K4V4, random_latents(queries, keys, batch=1 if mask.keys is None else 2), mask=mask)


@pytest.mark.parametrize("recipe", sampled([Recipe.of(), Recipe.of(kv=8), K4V4], 3), ids=["16", "8", "4"])
def test_as_many_heads_as_motif_3_has_take_several_tiles(recipe):
    check(recipe, random_latents(1, 70, pairs=64, noises=16))


def test_float32_is_exact():
    check(Recipe.of(k=16, v=8), random_latents(2, 70, dtype=torch.float32), limit=1e-5)


@pytest.mark.parametrize("size", [1e-3, 200.0])
def test_small_and_large_latents_keep_their_precision(size):
    q, turned, latents, lam = random_latents(1, 100)
    # Logits stay of the same size: what differs is how much of float16 the weighted latents take.
    queries = [torch.cat([x[..., :512] / size if size > 1 else x[..., :512], x[..., 512:]], -1) for x in q]
    check(Recipe.of(kv=4), (queries, turned, (latents.float() * size).half(), lam))


def test_tokens_decoded_one_by_one_equal_a_chunk():
    q, turned, latents, lam = random_latents(4, 60)
    store = stored_latents(Recipe.of(kv=8), turned[:, :, :56], latents[:, :, :56], capacity=60)
    steps = []
    for token in range(56, 60):
        append(store, turned[:, :, token : token + 1], latents[:, :, token : token + 1])
        step = slice(token - 56, token - 55)
        steps.append(decode_latent([x[:, :, step] for x in q], store, lam[:, :, step], scale=SCALE))
    chunk = decode_latent(q, store, lam, scale=SCALE)
    torch.testing.assert_close(torch.cat(steps, 2), chunk, rtol=0, atol=2e-3)


@in_one_test("recipe", [Recipe.of(), Recipe.of(kv=8, residual=20), K4V4])
def test_what_was_forgotten_may_have_been_nan(recipe):
    q, turned, latents, lam = random_latents(1, 80)
    for x in (turned, latents):
        x[:, :, 70:] = torch.nan
    store = stored_latents(recipe, turned, latents)
    store.crop(12)
    check(recipe, (q, turned, latents, lam), store=store)


def test_a_store_that_grew_is_read_whole():
    q, turned, latents, lam = random_latents(1, 150)
    store = stored_latents(Recipe.of(kv=4), turned[:, :, :100], latents[:, :, :100])
    store.grow(400)
    append(store, turned[:, :, 100:], latents[:, :, 100:])
    check(Recipe.of(kv=4), (q, turned, latents, lam), store=store)


def test_queries_of_any_strides():
    q, turned, latents, lam = random_latents(1, 40)
    q = [x.repeat_interleave(2, -1)[..., ::2] for x in q]
    check(Recipe.of(kv=8), (q, turned, latents, lam))


def test_tuned_tiles_compute_the_same():
    with override_configs({"latent/sm_80/8": {"tokens": 16, "warps": 8, "rows": 16}}):
        check(Recipe.of(kv=8), random_latents(1, 129, pairs=16, noises=4))
    wrong = {"latent/sm_80/8": {"tokens": 24, "rows": 48}}
    with (
        override_configs(wrong),
        pytest.raises(UsageError, match="8 warps of 24 tokens by 48 rows; a step of all warps must"),
    ):
        check(Recipe.of(kv=8), random_latents(1, 129))


def test_what_does_not_fit_is_named():
    q, turned, latents, lam = random_latents(17, 20)
    store = stored_latents(K4V4, turned, latents)
    with pytest.raises(UsageError, match="1 to 16 new tokens, not 17; use prefill for more"):
        decode_latent(q, store, lam, scale=SCALE)
    one = [x[:, :, :1] for x in q]
    with pytest.raises(UsageError, match=r"queries are torch\.float32 and the stored latents torch\.float16"):
        decode_latent([x.float() for x in one], store, lam[:, :, :1], scale=SCALE)
    with pytest.raises(UsageError, match=r"q is \[1, 4, 1, 512\], v \[1, 1, 128, 512\]: k1 \[1, 1, 128, 576\], not"):
        decode_latent([x[..., :512] for x in one], store, lam[:, :, :1], scale=SCALE)
    holes = Mask(torch.tensor([[True, False] * 10]))
    with pytest.raises(UsageError, match="the padding mask has holes"):
        decode_latent(one, store, lam[:, :, :1], scale=SCALE, mask=holes)
    with pytest.raises(UsageError, match="decode: the store has 64 channels and latents of 512; use decode_latent"):
        decode([x[..., :64] for x in one], store, lam[:, :, :1], scale=SCALE)
    q, k, v, lam = random_call("v2", 1, 20)
    other = KVStore(Recipe.of(), k[0], v, 20)
    with pytest.raises(UsageError, match="the store has 1 heads of 64 channels and 1 of 64; the kernel reads"):
        decode_latent(q, other, lam, scale=SCALE)
