"""Packed pages on a CUDA device: codes of a store without pages, and attention against the plain form in float64."""

import pytest
import torch

from diffquant.kernels.arguments import empty_output
from diffquant.kernels.cache import packed_pages as module
from diffquant.kernels.cache.append import append
from diffquant.kernels.cache.kv_store import KVStore
from diffquant.kernels.cache.packed_pages import decode_packed_pages
from diffquant.recipe import Recipe
from tests.support.kernel_inputs import random_call, relative_error
from tests.support.paged_inputs import expected_of_packed, fill, poisoned_store, shuffled_table

DEVICE = "cuda"
LIMITS = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
WIDTHS = [(128, torch.float16), (64, torch.bfloat16)]
RECIPES = [Recipe.of(kv=4), Recipe.of(k=6, v=6), Recipe.of(k=8, v=4)]
# A page is a block of c16, and half of or a quarter of one of c32 and c64.
RECIPES += [Recipe.of(k="4:c64", v=4), Recipe.of(k="6:c32", v=6, residual=20), Recipe.of(k="8:c16", v=4)]

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    monkeypatch.setattr(module, "empty_output", lambda q, width: empty_output(q, width).fill_(torch.nan))


@pytest.mark.parametrize(("width", "dtype"), WIDTHS, ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda x: f"{x.k}-{x.v}-{x.residual}")
@pytest.mark.parametrize(("generation", "window"), [("plain", None), ("v1", 70), ("v2", None)])
def test_pages_hold_a_stores_codes_and_are_attended_to_where_they_are(generation, window, recipe, width, dtype):
    lengths = [150, 0, 33]
    call = {"width": width, "pairs": 6, "kv_pairs": 3, "batch": 3, "dtype": dtype, "device": DEVICE}
    q, k, v, lam = random_call(generation, 2, 150, **call)
    both = k[0] if k[0] is k[-1] else torch.cat(list(k), 1)
    table, pages = shuffled_table(lengths, DEVICE)
    store, places = poisoned_store(recipe, both, v, pages, len(lengths))
    fill(store, both, v, table, lengths, [7, 40], places)
    sizes = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    read = store.read(table, sizes, places)
    for sequence, (own, length) in enumerate(zip(read, lengths, strict=True)):
        part = slice(sequence, sequence + 1)
        plain = KVStore(recipe, both[part], v[part], 150)
        append(plain, both[part, :, :length], v[part, :, :length])
        for x, wanted in zip(own, plain.read(), strict=True):
            assert torch.equal(x, wanted)
    out = decode_packed_pages(q, store, table, sizes, lam, scale=width**-0.5, window=window, places=places)
    wanted = expected_of_packed(q, k, read, lam, scale=width**-0.5, window=window)
    assert relative_error(out, wanted) <= LIMITS[dtype]
