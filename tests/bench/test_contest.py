"""The peers: who is there, that each computes what it says, and that one which does not is never timed."""

import math
import os
from itertools import accumulate, product
from multiprocessing import get_context

import pytest
import torch

from diffquant.benchmarks import contest, decode, linears, peers
from diffquant.benchmarks.contest import PeerComparison
from diffquant.benchmarks.workloads import Model, Workload, parse_lengths
from diffquant.errors import UsageError
from tests.support.tables import in_one_test
from tests.support.thorough import sampled

V1 = Model("v1", 128, 1, 2, 2, 64, 128, 192, 211)
V2 = Model("v2", 128, 1, 4, 2, 64, 64, 192, 211)
WORKS = {
    "v1": Workload(V1, 24, 24, 2, "float32"),
    "v2": Workload(V2, 24, 24, 2, "float32"),
    "v1 bf16": Workload(V1, 24, 24, 1, "bfloat16"),
}


@pytest.mark.parametrize("work", WORKS.values(), ids=WORKS)
@pytest.mark.parametrize("section", contest.SECTIONS)
def test_every_peer_agrees_with_naive_or_says_why_it_cannot_run(section, work):
    if section == "decode":
        work = Workload(work.model, 1, 150, work.batch, work.dtype)
    cells = PeerComparison(section, "cpu", 1)._times(work)
    assert [cell.path for cell in cells] == list(contest.SECTIONS[section])
    for cell in cells:
        if cell.values:
            assert cell.error <= cell.tolerance
        else:
            assert "CUDA" in cell.missing or "not installed" in cell.missing


@pytest.mark.parametrize(("bits", "generation"), sampled(product(decode.RECIPES, ["v1", "v2"]), 5))
def test_the_decode_kernel_reads_what_is_stored_for_it(generation, bits):
    pytest.importorskip("triton")
    call = peers.make_differential_call(Workload(WORKS[generation].model, 1, 150, 2, "float32"), "cpu")
    store = decode.fill_store(call, decode.RECIPES[bits])
    peer = peers.Peer(lambda held: decode.decode_attention(held, store))
    assert contest.relative_error(peer, decode._held_call(call, store, *store.read())) <= 1e-4


def test_a_peer_that_is_wrong_is_named_and_not_timed(monkeypatch):
    right = peers.PEERS["FlashDiffAttn_1"]
    ran = []

    def swapped(call):
        ran.append(call)
        return right.attention(call).flip(1)

    monkeypatch.setitem(peers.PEERS, "FlashDiffAttn_1", peers.Peer(swapped, right.make))
    (cell,) = [c for c in PeerComparison("attention", "cpu", 2)._times(WORKS["v1"]) if c.path == "FlashDiffAttn_1"]
    assert cell.missing.startswith("wrong result: ")
    assert not cell.values
    assert len(ran) == 1


@in_one_test("broken", [lambda y: y * math.nan, lambda y: y[:, :1]])
def test_values_that_are_not_finite_or_of_another_shape_are_infinitely_wrong(broken):
    right = peers.PEERS["FlashDiffAttn_2"]
    peer = peers.Peer(lambda call: broken(right.attention(call)), right.make)
    assert contest.relative_error(peer, right.make(WORKS["v1"], "cpu")) == math.inf


def test_an_error_in_the_last_rows_alone_is_seen(monkeypatch):
    monkeypatch.setattr(contest, "_CHECKED_QUERIES", 4)
    right = peers.PEERS["FlashDiffAttn_2"]

    def late(call):
        y = right.attention(call).clone()
        y[:, :, -1] += 1
        return y

    peer = peers.Peer(late, right.make)
    assert contest.relative_error(peer, right.make(WORKS["v1"], "cpu")) > 0.01


def test_a_peer_that_raises_is_named_with_its_error(monkeypatch):
    def fails(call):
        raise RuntimeError("no kernel for this\nand a long story")

    right = peers.PEERS["FlashDiffAttn_1"]
    monkeypatch.setitem(peers.PEERS, "FlashDiffAttn_1", peers.Peer(fails, right.make))
    (cell,) = [c for c in PeerComparison("attention", "cpu", 1)._times(WORKS["v1"]) if c.path == "FlashDiffAttn_1"]
    assert cell.missing == "RuntimeError: no kernel for this"


def allocating(call):
    """A known allocation: as many floats as a call has logits in one map; nothing is left of it but the output."""
    torch.ones(call.v.shape[2] * call.query_count * call.q[0].shape[1])
    return torch.ones(call.q[0].shape[0], call.q[0].shape[1], call.query_count, call.v.shape[-1])


# Linux counts pages to within a quarter of a megabyte.
UNCOUNTED = 3e5


def known_bytes(work):
    return 4 * work.model.pairs * work.queries * work.keys, 4 * work.batch * work.model.pairs * work.queries * 128


@pytest.fixture
def peaks(monkeypatch):
    """Peak of a peer on a workload, as the contest measures it; each in a process of its own, forked from this one."""
    monkeypatch.setattr(contest, "_fresh_processes", lambda: get_context("fork"))
    return lambda name, work: PeerComparison("attention", "cpu", 1, (name,)).measure_peak_memory(name, work, 1)


def test_a_peer_whose_process_dies_costs_no_other_peer_its_measurement(monkeypatch):
    right, here = peers.PEERS["FlashDiffAttn_2"], os.getpid()

    def dies_elsewhere(call):
        return right.attention(call) if os.getpid() == here else os._exit(9)

    monkeypatch.setitem(peers.PEERS, "killed", peers.Peer(dies_elsewhere, right.make))
    monkeypatch.setattr(contest, "_fresh_processes", lambda: get_context("fork"))
    cells = {c.path: c for c in PeerComparison("attention", "cpu", 1, ("killed",)).run([WORKS["v1"]])}
    assert cells[peers.BASELINE].values
    assert cells["killed"].missing.startswith("its peak memory could not be measured: BrokenProcessPool")
    assert not cells["killed"].values


def test_peak_memory_is_that_of_a_known_allocation_whatever_was_measured_before(monkeypatch, peaks):
    monkeypatch.setitem(peers.PEERS, "known", peers.Peer(allocating))
    blocks = [torch.ones(1 << 20) for _ in range(64)]
    del blocks[::2]  # leaves malloc much to give
    works = [Workload(V1, length, length, 1, "float32") for length in (1024, 700, 1024)]
    for work in works:
        temporary, output = known_bytes(work)
        assert temporary - UNCOUNTED <= peaks("known", work) <= max(temporary, output) + output + 1e6


@pytest.mark.parametrize(
    "name",
    sampled([name for name, peer in peers.PEERS.items() if peer.missing(peer.make(WORKS["v1"], "cpu")) is None], 4),
)
def test_peak_memory_grows_with_the_length_and_holds_what_torch_allocated(name):
    works = [Workload(V1, length, length, 2, "float32") for length in (300, 600)]
    measured = [PeerComparison("attention", "cpu", 1, (name,)).measure_peak_memory(name, work, 1) for work in works]
    assert measured[0] < measured[1]
    for work, peak in zip(works, measured, strict=True):
        assert peak >= known_bytes(work)[1]
        # Beyond torch's own blocks there are the libraries' buffers, of which each thread has one.
        counted = allocated_by_torch(peers.PEERS[name], work)
        # Simulated logits allocate their output before they write its first rows, and Linux counts what is written.
        unwritten = known_bytes(work)[1] if name.startswith("DIFF, simulated logits") else 0
        assert counted - unwritten - UNCOUNTED <= peak <= 1.1 * counted + 4e6


def test_decoding_takes_memory_too():
    # Outputs of 2 MB, which no freed memory of the start holds.
    work = Workload(V1, 1, 4, 2048, "float32")
    for name in (peers.BASELINE, "DIFF, eager", "DIFF, 8-bit cache, unpacked"):
        assert PeerComparison("decode", "cpu", 1, (name,)).measure_peak_memory(name, work, 1) >= known_bytes(work)[1]


@torch.inference_mode()
def allocated_by_torch(peer, work):
    """The most that torch's CPU allocator held of a call's at once, by torch's profiler."""
    call = peer.make(work, "cpu")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        held = peer.attention(call)
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    del held
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def test_the_baseline_is_always_among_the_entrants():
    assert list(PeerComparison("attention", "cpu", 1, ("DIFF, eager",)).select_peers()) == [
        peers.BASELINE,
        "DIFF, eager",
    ]


def test_lengths_are_lists_and_ranges_by_doubling():
    assert parse_lengths("512,1K") == [512, 1024]
    assert parse_lengths("1K-8K,100") == [1024, 2048, 4096, 8192, 100]


@in_one_test("text", ["", "0", "4K-1K", "1-2-3", "many", "512,", "-5", "9999999999K"])
def test_lengths_that_cannot_be_read_are_refused(text):
    with pytest.raises(UsageError, match="cannot read"):
        parse_lengths(text)


def test_linears_name_what_is_missing_and_check_the_rest(monkeypatch):
    monkeypatch.setitem(linears._COLD_BYTES, "cpu", 1 << 18)
    cells = {cell.path: cell for cell in linears.run_linears([V1], [1], "float32", "cpu", 1)}
    assert cells["dense"].values
    for bits in (8, 6, 4):
        cell = cells[f"packed, {bits} bits"]
        assert cell.error <= cell.tolerance
        assert cell.facts["rounding error"] > 0
        # 128 weights have a float32 scale.
        assert cell.facts["stored bytes"] == V1.hidden * V1.inner * (bits / 8 + 4 / 128)


@in_one_test(
    ("change", "reason"),
    [
        (lambda product, stored: (lambda x, i: 1.05 * product(x, i), stored), "against the dequantized weight"),
        (lambda product, stored: (product, stored.roll(1, 0)), "against the dequantized weight"),
        (lambda product, stored: (lambda x, i: 2 * product(x, i), 2 * stored), "wrong weight: rounding error"),
    ],
)
def test_a_wrong_product_or_a_wrong_weight_is_named_and_not_timed(monkeypatch, change, reason):
    monkeypatch.setitem(linears._COLD_BYTES, "cpu", 1 << 18)
    right = linears._ours(4)

    def wrong(weights):
        product, nbytes, stored = right(weights)
        product, stored = change(product, stored)
        return product, nbytes, stored

    monkeypatch.setitem(linears.PATHS, "packed, 4 bits", (wrong, 4))
    (cell,) = [c for c in linears.run_linears([V1], [1], "float32", "cpu", 1) if c.path == "packed, 4 bits"]
    assert reason in cell.missing
    assert not cell.values


def test_random_calls_are_the_same_every_time_and_nowhere_zero():
    first, second = (peers.make_differential_call(WORKS["v1"], "cpu") for _ in range(2))
    torch.testing.assert_close(first.q[1], second.q[1], rtol=0, atol=0)
    assert bool((first.v != 0).all())
