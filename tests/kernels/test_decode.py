"""Decoding from a store, interpreted, against the plain form in float64 over what the store reads back."""

from itertools import product

import pytest
import torch
from torch.library import opcheck

from diffquant.errors import UsageError
from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm
from diffquant.kernels.arguments import empty_output
from diffquant.kernels.cache import decode as module
from diffquant.kernels.cache.append import append
from diffquant.kernels.cache.decode import decode
from diffquant.kernels.cache.decode_split import TILES, choose_decode_config
from diffquant.kernels.cache.kv_store import KVStore
from diffquant.kernels.configs import override_configs
from diffquant.recipe import Recipe
from tests.support.kernel_inputs import VISIBLE, expected, random_call, relative_error
from tests.support.tables import in_one_test
from tests.support.thorough import sampled

LIMIT = 2e-3
K4V4 = Recipe.of(k="4:c32", v=4, residual=20)
RECIPES = [
    Recipe.of(),
    Recipe.of(kv=8),
    K4V4,
    Recipe.of(k=6, v="6", residual=5),
    Recipe.of(k=16, v=4, residual=33),
    Recipe.of(k="8:c16", v=16),
]


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    monkeypatch.setattr(module, "empty_output", lambda q, width: empty_output(q, width).fill_(torch.nan))


def stored(recipe, k, v):
    """A store that holds these, filled by a prompt and one token."""
    both = k[0] if k[0] is k[-1] else torch.cat(list(k), 1)
    store = KVStore(recipe, both, v, both.shape[2])
    last = max(both.shape[2] - 1, 1)
    for part in (slice(0, last), slice(last, None)):
        append(store, both[:, :, part], v[:, :, part])
    return store


def read_back(store, k):
    both, v = store.read()
    return list(both.chunk(2, 1)) if k[0] is not k[-1] else [both] * len(k), v


def check(recipe, call, *, mask=None, post=None, limit=LIMIT):
    q, k, v, lam = call
    mask = mask or Mask()
    store = stored(recipe, k, v)
    out = decode(q, store, lam, scale=0.125, mask=mask, post=post)
    wanted = expected(q, *read_back(store, k), lam, scale=0.125, mask=mask, post=post)
    assert out.shape == wanted.shape
    assert relative_error(out, wanted) <= limit
    return out


# Each recipe and each generation is in every fourth of their pairs.
@pytest.mark.parametrize(
    ("recipe", "generation"),
    sampled(product(RECIPES, ["plain", "v1", "v2"]), 4),
    ids=lambda x: x if isinstance(x, str) else f"{x.k}-{x.v}-{x.residual}",
)
def test_equals_the_plain_form(generation, recipe):
    check(recipe, random_call(generation, 1, 129))


@pytest.mark.parametrize("recipe", [Recipe.of(k="4:c16", v=4), Recipe.of(k="8:c16", v=8)], ids=["4 bits", "8 bits"])
def test_key_scales_of_fewer_tokens_than_a_warp_takes_are_each_tokens_own(recipe):
    assert TILES[f"decode/sm_80/64/{recipe.v.bits}"]["tokens"] > 16
    q, k, v, lam = random_call("v2", 1, 129)
    # Blocks of 16 tokens differ by a factor of 4, and so do their scales.
    sizes = 4.0 ** (torch.arange(129) // 16 % 2 * 2 - 1)
    k = [k[0] * sizes[:, None].half()] * 2
    check(recipe, (q, k, v, lam))


@pytest.mark.parametrize(("keys", "queries", "mask"), sampled(VISIBLE.values(), 3), ids=VISIBLE)
def test_what_a_query_sees(keys, queries, mask):
    batch = 1 if mask.keys is None else 2
    # Of several sequences, each has several heads.
    check(K4V4, random_call("v1", queries, keys, batch=batch, kv_pairs=batch), mask=mask)


@pytest.mark.parametrize("dtype", sampled([torch.float16, torch.float32], 2), ids=str)
def test_wide_heads_many_rows_and_mixed_bits(dtype):
    call = random_call("v1", 3, 70, width=128, pairs=6, kv_pairs=2, dtype=dtype)
    check(Recipe.of(k="6:c64", v=8, residual=2), call, limit=LIMIT if dtype == torch.float16 else 1e-5)


@pytest.mark.parametrize("queries", sampled([1, 3], 2))
@pytest.mark.parametrize(("pairs", "noises", "kv_pairs"), [(8, 2, 2), (36, 12, 4)], ids=["4 to 1", "36 to 12"])
def test_pairs_that_share_a_noise_head_read_it_once(pairs, noises, kv_pairs, queries):
    q, k, v, lam = random_call("v1", queries, 70, pairs=pairs, kv_pairs=kv_pairs)
    check(K4V4, ([q[0], q[1][:, :: pairs // noises]], k, v, lam))


def test_noise_heads_that_no_value_head_has_whole_are_refused():
    q, k, v, lam = random_call("v1", 1, 20, pairs=8, kv_pairs=2)
    with pytest.raises(UsageError, match="1 noise heads are not a multiple of 2 value heads; repeat noise heads"):
        decode([q[0], q[1][:, :1]], stored(K4V4, k, v), lam, scale=0.125)


@in_one_test("weighted", [False, True])
def test_the_pair_norm_is_part_of_the_kernel(weighted):
    post = PairNorm(1e-5, torch.linspace(0.5, 2, 128).half() if weighted else None, 0.64)
    check(Recipe.of(kv=8), random_call("v1", 1, 40), post=post)


@in_one_test("size", [1e-4, 200.0])
def test_small_and_large_values_keep_their_precision(size):
    q, k, v, lam = random_call("v2", 1, 100)
    check(Recipe.of(kv=4), (q, k, (v.float() * size).half(), lam))


def test_tokens_decoded_one_by_one_equal_a_chunk():
    q, k, v, lam = random_call("v2", 4, 60)
    store = KVStore(Recipe.of(kv=6), k[0], v, 60)
    append(store, k[0][:, :, :56], v[:, :, :56])
    steps = []
    for token in range(56, 60):
        append(store, k[0][:, :, token : token + 1], v[:, :, token : token + 1])
        step = slice(token - 56, token - 55)
        steps.append(decode([x[:, :, step] for x in q], store, lam[:, :, step], scale=0.125))
    chunk = decode(q, store, lam, scale=0.125)
    torch.testing.assert_close(torch.cat(steps, 2), chunk, rtol=0, atol=2e-3)


def test_after_the_newest_tokens_were_forgotten_for_queries_of_any_strides():
    q, k, v, lam = random_call("v1", 1, 80)
    q = [x.repeat_interleave(2, -1)[..., ::2] for x in q]
    store = stored(Recipe.of(k="4:c32", v=4, residual=4), k, v)
    store.crop(16)
    out = decode(q, store, lam, scale=0.125)
    assert relative_error(out, expected(q, *read_back(store, k), lam, scale=0.125)) <= LIMIT


@in_one_test("recipe", [Recipe.of(), Recipe.of(kv=8, residual=20), K4V4])
def test_what_was_forgotten_may_have_been_nan(recipe):
    q, k, v, lam = random_call("v1", 1, 80)
    for x in (*k, v):
        x[:, :, 70:] = torch.nan
    store = stored(recipe, k, v)
    store.crop(12)
    out = decode(q, store, lam, scale=0.125)
    assert relative_error(out, expected(q, *read_back(store, k), lam, scale=0.125)) <= LIMIT


def test_what_does_not_fit_is_named():
    q, k, v, lam = random_call("v1", 17, 20)
    store = stored(K4V4, k, v)
    with pytest.raises(UsageError, match="decode: the kernels take 1 to 16 new tokens, not 17"):
        decode(q, store, lam, scale=0.125)
    one = [x[:, :, :1] for x in q]
    with pytest.raises(UsageError, match="decode: 2 key heads do not fit 1 maps and 1 value heads"):
        decode(one[:1], store, None, scale=0.125)
    with pytest.raises(UsageError, match=r"q1 is float32"):
        decode([x.float() for x in one], store, lam, scale=0.125)


@in_one_test(("tokens", "warps"), [(8, 4), (32, 3)])
def test_tuned_tiles_that_do_not_fill_the_steps_of_a_store_are_refused(tokens, warps):
    tuned = override_configs({"decode/sm_80/64/4": {"tokens": tokens, "warps": warps}})
    with tuned, pytest.raises(UsageError, match="in which a store grows"):
        choose_decode_config(TILES, "decode/sm_80/64/4")


def test_the_operator_has_a_fake():
    q, k, v, lam = random_call("v2", 1, 20)
    store = stored(Recipe.of(kv=4, residual=1), k, v)
    sides = store.keys.tensors, store.values.tensors
    arguments = (q, *sides, store.progress, lam, None, None, None, 4, 1, 4, 1, True, None, 0.125, False, 0.0, 1.0)
    opcheck(module._op, arguments)
