"""Decoding from pages, interpreted, against the plain form in float64 over the gathered tokens of each sequence."""

import pytest
import torch

from diffquant.errors import UsageError
from diffquant.family.norm import PairNorm
from diffquant.kernels.arguments import empty_output
from diffquant.kernels.cache import paged as module
from diffquant.kernels.cache.paged import decode_paged
from tests.support.kernel_inputs import random_call, relative_error
from tests.support.paged_inputs import expected_paged, paged
from tests.support.tables import in_one_test
from tests.support.thorough import sampled

LIMIT = 2e-3


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    monkeypatch.setattr(module, "empty_output", lambda q, width: empty_output(q, width).fill_(torch.nan))


def check(generation, queries, lengths, *, fused=False, window=None, post=None, limit=LIMIT, **shape):
    q, k, v, lam = random_call(generation, queries, max(lengths), batch=len(lengths), **shape)
    pages = paged(k, v, lengths, fused=fused)
    out = decode_paged(q, pages.k, pages.v, pages.table, pages.lengths, lam, scale=0.125, window=window, post=post)
    wanted = expected_paged(q, pages, lam, scale=0.125, window=window, post=post)
    assert out.shape == wanted.shape
    assert relative_error(out, wanted) <= limit
    return out


@in_one_test("generation", ["plain", "v1", "v2"])
def test_shuffled_pages_of_sequences_of_any_length(generation):
    check(generation, 1, [129, 16, 1, 100])


@pytest.mark.parametrize("dtype", sampled([torch.float16, torch.float32], 2), ids=str)
def test_wide_heads_and_many_rows(dtype):
    limit = LIMIT if dtype == torch.float16 else 1e-5
    check("v1", 3, [70, 33], width=128, pairs=6, kv_pairs=2, dtype=dtype, limit=limit)


def test_both_maps_keys_in_one_head_of_the_cache():
    check("v1", 1, [47, 90], pairs=4, kv_pairs=2, fused=True)


@pytest.mark.parametrize("window", sampled([1, 20, 64, 500], 4))
@pytest.mark.parametrize("queries", [1, 3])
def test_a_window_hides_what_lies_before_it(window, queries):
    check("v2", queries, [200, 65, 30], window=window)


def test_pages_before_the_window_are_not_looked_up():
    q, k, v, lam = random_call("v1", 2, 300)
    pages = paged(k, v, [300])
    wanted = expected_paged(q, pages, lam, scale=0.125, window=40)
    pages.table[0, : (300 - 2 - 40 + 1) // 16] = 2**30
    out = decode_paged(q, pages.k, pages.v, pages.table, pages.lengths, lam, scale=0.125, window=40)
    assert relative_error(out, wanted) <= LIMIT


def test_more_queries_than_tokens_and_rows_without_a_sequence():
    out = check("v1", 5, [3, 0, 17])
    assert not out[0, :, :2].any()
    assert not out[1].any()


@pytest.mark.parametrize("queries", sampled([1, 3], 2))
@pytest.mark.parametrize(("pairs", "noises", "kv_pairs"), [(8, 2, 2), (36, 12, 4)], ids=["4 to 1", "36 to 12"])
def test_pairs_that_share_a_noise_head_read_it_once(pairs, noises, kv_pairs, queries):
    q, k, v, lam = random_call("v1", queries, 70, pairs=pairs, kv_pairs=kv_pairs)
    q = [q[0], q[1][:, :: pairs // noises]]
    pages = paged(k, v, [70])
    out = decode_paged(q, pages.k, pages.v, pages.table, pages.lengths, lam, scale=0.125)
    assert relative_error(out, expected_paged(q, pages, lam, scale=0.125)) <= LIMIT


def test_the_pair_norm_is_part_of_the_kernel():
    check("v1", 1, [40, 21], post=PairNorm(1e-5, torch.linspace(0.5, 2, 128).half(), 0.64))


def test_heads_before_tokens_in_memory_and_queries_of_any_strides():
    q, k, v, lam = random_call("v2", 1, 50, kv_pairs=2)
    q = [x.repeat_interleave(2, -1)[..., ::2] for x in q]
    pages = paged(k, v, [50])
    wanted = expected_paged(q, pages, lam, scale=0.125)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (pages.k[0], pages.v)]
    out = decode_paged(q, [turned[0]] * 2, turned[1], pages.table, pages.lengths, lam, scale=0.125)
    assert relative_error(out, wanted) <= LIMIT


def test_a_longer_table_changes_only_how_keys_are_shared_out():
    q, k, v, lam = random_call("v1", 1, 200)
    pages = paged(k, v, [200])
    wide = torch.cat([pages.table, torch.full((1, 500), 2**30, dtype=torch.int32)], 1)
    out = decode_paged(q, pages.k, pages.v, wide, pages.lengths, lam, scale=0.125)
    assert relative_error(out, expected_paged(q, pages, lam, scale=0.125)) <= LIMIT


def test_all_that_is_wrong_is_named():
    q, k, v, lam = random_call("v1", 1, 40)
    pages = paged(k, v, [40])
    with pytest.raises(UsageError) as raised:
        decode_paged(q, [k[0], k[1]], pages.v, pages.table.long(), pages.lengths, lam, scale=0.125, window=0)
    for said in ("k1 [1, 1, 40, 64]", "k2 [1, 1, 40, 64]", "the table is torch.int64", "the window is 0 keys"):
        assert said in str(raised.value)
    with pytest.raises(UsageError, match="queries are of 1 sequences, the table of 1, lengths of 2"):
        decode_paged(q, pages.k, pages.v, pages.table, pages.lengths.repeat(2), lam, scale=0.125)
    with pytest.raises(UsageError, match="1 to 16 new tokens, not 17; use prefill for more"):
        decode_paged([x.repeat(1, 1, 17, 1) for x in q], pages.k, pages.v, pages.table, pages.lengths, lam, scale=1.0)
    other = torch.cat([pages.k[1]] * 2, -1)[..., :64]
    with pytest.raises(UsageError, match=r"strides of the two maps' keys differ"):
        decode_paged(q, [pages.k[0], other], pages.v, pages.table, pages.lengths, lam, scale=0.125)
