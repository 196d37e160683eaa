"""Packed pages, interpreted: the codes of `KVStore`, and attention against the plain form in float64 over them."""

from itertools import product

import pytest
import torch

from diffquant.errors import UsageError
from diffquant.kernels.arguments import empty_output
from diffquant.kernels.cache import packed_pages as module
from diffquant.kernels.cache.append import append
from diffquant.kernels.cache.kv_store import KVStore
from diffquant.kernels.cache.packed_pages import PagedStore, decode_packed_pages
from diffquant.recipe import Recipe
from tests.support.kernel_inputs import random_call, relative_error
from tests.support.paged_inputs import expected_of_packed, fill, poisoned_store, shuffled_table
from tests.support.thorough import sampled

# Generation, queries and window.
CALLS = [("plain", 1, None), ("v1", 3, 40), ("v2", 1, 20), ("v1", 1, None), ("v2", 2, None)]
RECIPES = [Recipe.of(kv=4), Recipe.of(k=6, v=6), Recipe.of(k=8, v=4), Recipe.of(kv=8)]
# A page is a block of c16, and half of or a quarter of one of c32 and c64.
BLOCKS = [
    Recipe.of(k="4:c64", v=4),
    Recipe.of(k="6:c32", v=4),
    Recipe.of(k="8:c16", v=6),
    Recipe.of(k="4:c32", v=8, residual=20),
    Recipe.of(k=4, v=4, residual=7),
]


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    monkeypatch.setattr(module, "empty_output", lambda q, width: empty_output(q, width).fill_(torch.nan))


def named(x):
    return f"{x.k}-{x.v}-{x.residual}" if isinstance(x, Recipe) else "-".join(map(str, x))


def filled(recipe, k, v, lengths, chunks=(7, 40)):
    """A store of pages, its table, and where its tokens wait."""
    both = k[0] if k[0] is k[-1] else torch.cat(list(k), 1)
    table, pages = shuffled_table(lengths, v.device)
    store, places = poisoned_store(recipe, both, v, pages, len(lengths))
    fill(store, both, v, table, lengths, chunks, places)
    return store, table, places


@pytest.mark.parametrize("recipe", sampled(RECIPES + BLOCKS, 3), ids=named)
def test_what_is_stored_are_the_codes_of_a_store_without_pages(recipe):
    lengths = [150, 64, 1]
    _, k, v, _ = random_call("v1", 1, 150, batch=3)
    store, table, places = filled(recipe, k, v, lengths)
    both = torch.cat(k, 1)
    for sequence, read in enumerate(store.read(table, torch.tensor(lengths), places)):
        own, length = slice(sequence, sequence + 1), lengths[sequence]
        plain = KVStore(recipe, both[own], v[own], 150)
        append(plain, both[own, :, :length], v[own, :, :length])
        for x, wanted in zip(read, plain.read(), strict=True):
            assert torch.equal(x, wanted)


# Each call is in every eighth of their pairs.
@pytest.mark.parametrize(("recipe", "call"), sampled(product(RECIPES + BLOCKS, CALLS), 8), ids=named)
def test_equals_the_plain_form_over_what_reads_back(recipe, call):
    generation, queries, window = call
    lengths = [129, 16, 0, 50]
    q, k, v, lam = random_call(generation, queries, 129, batch=4, pairs=4, kv_pairs=2)
    store, table, places = filled(recipe, k, v, lengths)
    sizes = torch.tensor(lengths, dtype=torch.int32)
    wanted = expected_of_packed(q, k, store.read(table, sizes, places), lam, scale=0.125, window=window)
    if window is not None:
        # Pages whose blocks no query sees any of are another's by now.
        table[0, : (129 - queries - window + 1) // store.keys.block * store.keys.block // 16] = 2**30
    out = decode_packed_pages(q, store, table, sizes, lam, scale=0.125, window=window, places=places)
    assert relative_error(out, wanted) <= 2e-3


def test_a_window_within_the_rings_reads_no_page_that_was_released():
    recipe = Recipe.of(k="4:c32", v=8, residual=20)
    test_equals_the_plain_form_over_what_reads_back(recipe, ("v2", 1, 20))


def test_what_pages_do_not_hold_is_refused_by_name():
    q, k, v, lam = random_call("v2", 1, 20)
    for recipe, said in (
        (Recipe.of(k=16, v=4), "k has 16 bits; use `decode_paged`, which reads unquantized pages"),
        (Recipe.of(k="4:c128", v=4), "k has scales per 128 tokens; pages support row, c16, c32 and c64"),
        (Recipe.of(k="4:c64", v=4), "k 4:c64, v 4:row and a residual of 0, new tokens stay unquantized for a while"),
        (Recipe.of(kv=3), "3 bits"),
    ):
        with pytest.raises(UsageError, match=said):
            PagedStore(recipe, k[0], v, 4)
    store, table, _ = filled(Recipe.of(kv=4), k, v, [20])
    sizes = torch.tensor([20], dtype=torch.int32)
    other = PagedStore(Recipe.of(kv=4), k[0], v.repeat(1, 2, 1, 1), 4)
    with pytest.raises(UsageError, match="1 key heads do not fit 1 maps and 2 value heads"):
        decode_packed_pages(q[:1], other, table, sizes, None, scale=0.125)
    with pytest.raises(UsageError, match=r"k is torch\.float32"):
        store.append(k[0].float(), v, table, sizes)
    waiting = PagedStore(Recipe.of(k="4:c16", v=4), k[0], v, 4, places=1)
    for places, said in ((None, "pass each sequence's ring"), (sizes.long(), r"places are torch\.int64 \[1\]")):
        with pytest.raises(UsageError, match=said):
            waiting.append(k[0], v, table, sizes, places)
    with pytest.raises(UsageError, match="places are given, but these pages need no rings"):
        decode_packed_pages(q, store, table, sizes, lam, scale=0.125, places=sizes)
