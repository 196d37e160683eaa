"""Implementations that the research measures beside those of `diffquant bench`."""

import pytest

from diffquant.benchmarks import linears
from diffquant.benchmarks.contest import PeerComparison
from diffquant.benchmarks.workloads import Model, Workload
from research.bench import peers
from tests.support.tables import in_one_test

V1 = Model("v1", 128, 1, 2, 2, 64, 128, 192, 211)
V2 = Model("v2", 128, 1, 4, 2, 64, 64, 192, 211)
WORKS = [Workload(V1, 24, 24, 2, "float32"), Workload(V2, 24, 24, 2, "float32"), Workload(V1, 24, 24, 1, "bfloat16")]


@pytest.mark.parametrize("work", WORKS, ids=["v1", "v2", "v1 bf16"])
def test_every_peer_agrees_with_naive_or_says_why_it_cannot_run(work):
    names = [name for name in peers.PEERS if "DiffLlama" in name or "Flex" in name]
    cells = [cell for cell in PeerComparison("attention", "cpu", 1, tuple(names))._times(work) if cell.path in names]
    assert len(cells) == len(names) == 3
    for cell in cells:
        if cell.values:
            assert cell.error <= cell.tolerance
        else:
            assert "CUDA" in cell.missing or "not have DIFF V2" in cell.missing


@in_one_test("name", ["bitsandbytes, NF4", "torchao, int4"])
def test_peers_of_linears_store_their_scales_too_or_are_named(monkeypatch, name):
    monkeypatch.setitem(linears._COLD_BYTES, "cpu", 1 << 18)
    (cell,) = [c for c in linears.run_linears([V1], [1], "bfloat16", "cpu", 1) if c.path == name]
    if cell.values:
        # At least a scale of 8 bits for 128 weights.
        assert cell.facts["stored bytes"] >= V1.hidden * V1.inner * (0.5 + 1 / 128)
    else:
        assert "not installed" in cell.missing or "Requires" in cell.missing
