"""Packed pages of several sequences, interpreted: one launch appends to all, and what a call may say of its queries."""

import pytest
import torch

from diffquant.family.norm import PairNorm
from diffquant.kernels.arguments import empty_output
from diffquant.kernels.cache import packed_pages as module
from diffquant.kernels.cache.append import append
from diffquant.kernels.cache.kv_store import KVStore
from diffquant.kernels.cache.packed_pages import PagedStore, decode_packed_pages
from diffquant.recipe import Recipe
from tests.support.kernel_inputs import random_call, relative_error
from tests.support.paged_inputs import expected_of_packed


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    monkeypatch.setattr(module, "empty_output", lambda q, width: empty_output(q, width).fill_(torch.nan))


def filled(recipe, k, v, lengths):
    """Pages with the newest tokens of [B, H, S, w], and columns of a wider table that names them.

    The column behind a sequence's own has a page of the other one.
    """
    table = torch.tensor([[2, 3, 1], [0, 1, 2]], dtype=torch.int32)[:, :2]
    store = PagedStore(recipe, k, v, 4)
    store.append(k, v, table, torch.tensor(lengths, dtype=torch.int32))
    return store, table


def test_a_sequence_keeps_the_newest_tokens_that_its_pages_hold():
    recipe = Recipe.of(k=8, v=4)
    _, k, v, _ = random_call("v1", 1, 40, batch=2, kv_pairs=2)
    both = torch.cat(k, 1)
    for x in (both, v):
        # Their scales are as large as a scale may be.
        x[:, :, 25] = torch.finfo(torch.float16).max
    store, table = filled(recipe, both, v, [20, 40])
    plain = KVStore(recipe, both, v, 40)
    append(plain, both, v)
    read = store.read(table, torch.tensor([20, 32]))
    for sequence, tokens in enumerate((slice(20, 40), slice(0, 32))):
        for x, all_of_it in zip(read[sequence], plain.read(), strict=True):
            assert torch.equal(x[0], all_of_it[sequence, :, tokens])


def test_noise_heads_the_pair_norm_and_strides_of_queries():
    q, k, v, lam = random_call("v1", 2, 32, pairs=8, kv_pairs=2, batch=2)
    q = [x.repeat_interleave(2, -1)[..., ::2] for x in (q[0], q[1][:, ::4])]
    post = PairNorm(1e-5, torch.linspace(0.5, 2, 128).half(), 0.64)
    store, table = filled(Recipe.of(kv=8), torch.cat(k, 1), v, [32, 21])
    sizes = torch.tensor([32, 21], dtype=torch.int32)
    out = decode_packed_pages(q, store, table, sizes, lam, scale=0.125, post=post)
    wanted = expected_of_packed(q, k, store.read(table, sizes), lam, scale=0.125, post=post)
    assert relative_error(out, wanted) <= 2e-3
