"""The cost model of Hopper: its arithmetic by hand, and what it says of kernels compiled without a GPU."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from diffquant.bench.contest.counts import transformer
from diffquant.bench.contest.workloads import Workload, model_named
from diffquant.bench.gpu import hopper
from diffquant.bench.gpu.binaries import Binary
from diffquant.bench.gpu.estimate import CUDNN, attention_seconds, report, tile_steps
from diffquant.bench.gpu.groups import Aim
from diffquant.bench.gpu.hopper import blocks_at_once, seconds, step

ROOT = Path(__file__).parents[2]
# 128 queries and 128 keys of d = 128 for a warpgroup: QK and PV in fp16.
PRODUCTS = {"16": 2 * 64 * 128 * 128}


def binary(loops, products, *, barriers=0, hiding=0.0, registers=255, shared=200_000, warps=8, opcodes=None):
    return Binary(
        "kernel",
        90,
        registers,
        0,
        shared,
        warps,
        opcodes or {},
        loops,
        products,
        [hiding] * len(loops),
        [barriers] * len(loops),
        0,
        [],
        [],
        {},
    )


INNER, EDGE = {"HGMMA": 16, "FFMA": 418, "MUFU": 66}, {"HGMMA": 16, "FFMA": 618, "MUFU": 66}


def test_products_and_instructions_take_turns_where_a_lone_block_meets():
    each = step(binary([EDGE, INNER], [PRODUCTS] * 2, barriers=1))
    # Two warpgroups, 2,048 multiply-adds a cycle; eight warps on four schedulers; 16 special functions a cycle.
    assert (each.products, each.instructions, each.special) == (2048, 1000, 1056)
    assert each.cycles == pytest.approx(3048 / hopper.TAKING_TURNS)


def test_they_overlap_where_other_blocks_or_warpgroups_are_elsewhere():
    apart = binary([INNER, EDGE], [PRODUCTS] * 2, barriers=1, registers=96, shared=100_000)
    assert blocks_at_once(apart) == 2
    assert step(apart).cycles == pytest.approx(2048 / hopper.OVERLAPPED)
    # Two warpgroups of four warps, each with an inner loop and an edge.
    consumers = binary([INNER, EDGE] * 2, [PRODUCTS] * 4, registers=168, warps=9, opcodes={"USETMAXREG": 4})
    each = step(consumers)
    assert (each.products, each.instructions, each.barriers) == (2048, 1000, 0)
    assert each.cycles == pytest.approx(2048 / hopper.OVERLAPPED)


@pytest.mark.parametrize(
    ("hiding", "tflops"), [(0.0, 616 * 582 / 661), (0.25, 616 * (582 + 661) / 2 / 661), (0.7, 616)]
)
def test_what_is_under_way_at_exponentials_brings_it_nearer_to_flash_attention_3(hiding, tflops):
    consumers = {"registers": 168, "warps": 12, "opcodes": {"USETMAXREG": 4}}
    each = step(binary([INNER, EDGE] * 2, [PRODUCTS] * 4, hiding=hiding, **consumers))
    assert each.cycles == pytest.approx(2048 / (tflops / 989))


def test_eight_bits_multiply_twice_as_fast_and_warps_alone_slower():
    loop = {"QGMMA": 8}
    assert step(binary([loop], [{"8": 2 * 64 * 128 * 128}])).products == 1024
    assert step(binary([{"HMMA": 2}], [{"16": 2 * 2048}])).products == pytest.approx(8 * 2 / hopper.WARP_PRODUCTS)


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "blocks"),
    # NVIDIA's occupancy calculator for compute capability 9.0.
    [(255, 10_000, 8, 1), (128, 10_000, 8, 2), (64, 10_000, 8, 4), (32, 0, 8, 8), (32, 100_000, 4, 2)],
)
def test_a_multiprocessor_holds_as_many_blocks_as_the_occupancy_calculator_says(registers, shared, warps, blocks):
    assert blocks_at_once(binary([], [], registers=registers, shared=shared, warps=warps)) == blocks


def test_the_last_wave_leaves_processors_idle():
    kernel = binary([INNER], [PRODUCTS])
    full = seconds(kernel, hopper.H200, 13_200, 0, 132)
    assert seconds(kernel, hopper.H200, 13_200, 0, 133) == pytest.approx(full * 2 * 132 / 133)


def test_a_block_that_finds_no_other_on_its_multiprocessor_takes_turns_with_itself():
    kernel = replace(binary([INNER], [PRODUCTS], registers=128, shared=50_000, warps=4), barriers=[2])
    assert blocks_at_once(kernel) > 2
    assert step(kernel, 264).cycles == step(kernel).cycles < step(kernel, 132).cycles
    # Two side by side take as long as that many steps, and none waits for a third.
    assert seconds(kernel, hopper.H200, 26_400, 0, 264) == seconds(kernel, hopper.H200, 26_400, 0)


@pytest.mark.parametrize("card", hopper.CARDS, ids=lambda card: card.name)
def test_a_card_moves_bytes_at_its_own_speed(card):
    kernel = binary([INNER], [PRODUCTS])
    assert seconds(kernel, card, 0, card.bytes_a_second) == 1 + hopper.RAMP_SECONDS
    early = replace(kernel, early_loads=6)
    assert seconds(early, card, 0, card.bytes_a_second) == 1 + hopper.RAMP_SECONDS / 2


def test_a_block_of_one_step_computes_when_what_it_asked_for_has_come():
    kernel = binary([INNER], [PRODUCTS])
    computing = seconds(kernel, hopper.H200, 264, 0)
    moving = seconds(kernel, hopper.H200, 0, 4e7)
    assert seconds(kernel, hopper.H200, 132, 4e7, 132) == pytest.approx(computing / 2 + moving)
    # Of two steps, the second one's loads come while the first is computed.
    assert seconds(kernel, hopper.H200, 264, 4e7, 132) == max(computing, moving)


@pytest.mark.parametrize(("tokens", "queries", "keys"), [(512, 128, 128), (1000, 128, 64), (65, 64, 128)])
def test_causal_tiles_take_the_steps_that_any_of_their_queries_sees(tokens, queries, keys):
    visited = {(q // queries, k // keys) for q in range(tokens) for k in range(q + 1)}
    assert tile_steps(tokens, queries, keys) == len(visited)


def test_a_rival_takes_what_its_published_speed_says():
    work = Workload(model_named("3B"), 16384, 16384, 1, "float16")
    assert attention_seconds(16384, 4, CUDNN) == pytest.approx(transformer(work).operations / CUDNN, rel=1e-4)


def test_the_report_holds_each_ratio_to_its_aim():
    estimates = {"ours": [(binary([INNER], [PRODUCTS]), 2.0)]}
    aims = [("P1", Aim("ours", "theirs", 1.5)), ("P2", Aim("ours", "theirs", 1.6))]
    text = report(hopper.H100, estimates, {"theirs": 3.0}, aims)
    assert text.startswith("H100:")
    first, second = (line for line in text.splitlines() if line.startswith(("P1", "P2")))
    assert first == "P1   1.50x  aim 1.50x reached  ours  against  theirs"
    assert "aim 1.60x missed" in second
    assert "Nothing here was measured" in hopper.ASSUMPTIONS
    assert "255 registers" in text
    assert "0 barriers of the block" in text


PROGRAM = """
from diffquant.bench.gpu.estimate import compiled, estimate
from diffquant.bench.gpu.hopper import H100
from diffquant.bench.gpu.estimated_paths import _GEMM, AIMS, paths, rivals
planned = paths()
asked = {name for _, aim in AIMS for name in (aim.path, aim.other)}
print(sorted(asked - {p.name for p in planned} - rivals(H100).keys()))
gemm = next(p for p in planned if p.name == _GEMM(1024))
(part, seconds), = estimate(compiled(gemm, H100.absent), H100)
print(part.kernel, part.registers > 0, 0 < seconds < 1e-4)
"""


def test_kernels_are_compiled_through_their_launch_code_without_a_gpu():
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[]", "_gemm True True"], done.stderr
