"""Decoding from pages on a CUDA device, against the plain form in float64."""

import pytest
import torch

from diffquant.kernels.arguments import empty_output
from diffquant.kernels.cache import paged as module
from diffquant.kernels.cache.paged import decode_paged
from tests.support.kernel_inputs import random_call, relative_error
from tests.support.paged_inputs import expected_paged, paged

DEVICE = "cuda"
LIMITS = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
WIDTHS = [(128, torch.float16), (64, torch.bfloat16)]

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    monkeypatch.setattr(module, "empty_output", lambda q, width: empty_output(q, width).fill_(torch.nan))


def check(generation, queries, lengths, *, window=None, fused=False, **shape):
    q, k, v, lam = random_call(generation, queries, max(lengths), batch=len(lengths), device=DEVICE, **shape)
    pages = paged(k, v, lengths, fused=fused)
    scale = q[0].shape[3] ** -0.5
    out = decode_paged(q, pages.k, pages.v, pages.table, pages.lengths, lam, scale=scale, window=window)
    wanted = expected_paged(q, pages, lam, scale=scale, window=window)
    assert relative_error(out, wanted) <= LIMITS[v.dtype]


@pytest.mark.parametrize(("width", "dtype"), WIDTHS, ids=str)
@pytest.mark.parametrize("lengths", [(300, 1, 0, 65), (16, 129)], ids=str)
@pytest.mark.parametrize("generation", ["plain", "v1", "v2"])
def test_shuffled_pages_of_sequences_of_any_length(generation, lengths, width, dtype):
    check(generation, 1, lengths, width=width, dtype=dtype, pairs=6, kv_pairs=3)


@pytest.mark.parametrize("window", [None, 1, 70])
def test_chunks_see_a_window_and_both_maps_keys_in_one_head(window):
    check("v1", 3, (200, 2, 97), window=window, fused=True, pairs=4, kv_pairs=2)


def test_a_captured_step_is_valid_while_sequences_grow_and_pages_change():
    q, k, v, lam = random_call("v1", 1, 150, batch=2, dtype=torch.float16, device=DEVICE)
    pages = paged(k, v, [150, 150])
    table, lengths = pages.table, pages.lengths

    def step():
        return decode_paged(q, pages.k, pages.v, table, lengths, lam, scale=0.125)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for grown in ([1, 150], [17, 16], [150, 0]):
        lengths.copy_(torch.tensor(grown, dtype=torch.int32))
        table.copy_(table.flip(0))
        graph.replay()
        assert relative_error(out, expected_paged(q, pages, lam, scale=0.125)) <= LIMITS[torch.float16]
