"""What the shipped linear kernels use of a GPU, compiled without one."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from diffquant.kernels.linear.repack import repack
from diffquant.recipe.numbers.packing import packed_words
from tests.support.offline import SHARED_LIMIT, compiled
from tests.support.thorough import thorough

# Instructions a weight of a thread's, all of the loop's. At the pace of an H200's memory (4.8 TB/s, 132
# processors at 1.75 GHz, 128 instructions a cycle) there is time for 3.1, 4.1 and 6.2, which 6 bits just miss;
# an A100's leaves more.
pytestmark = thorough

MOST_INSTRUCTIONS = {(90, 4): 2.8, (90, 6): 4.2, (90, 8): 4.5, (80, 4): 3.0, (80, 6): 4.6, (80, 8): 4.5}
# Hopper's table is compiled in one half type, Ampere's in the other, which has more to do for 8 bits.
DTYPES = {90: torch.float16, 80: torch.bfloat16}
GEMM_CASES = [(4, 32), (4, 64), (4, 128), (6, 128), (8, 128)]


def zeros(rows, width, bits, group, dtype):
    words = torch.zeros(rows, packed_words(width, bits), dtype=torch.int32)
    return repack(words, torch.ones(rows, width // group, dtype=dtype), bits, width)


def launches():
    from diffquant.kernels.linear.gemm import launch_dequantize
    from diffquant.kernels.linear.linear import launch_matmul

    for capability, dtype in DTYPES.items():
        for bits in (4, 6, 8):
            packed, x = zeros(64, 3072, bits, 128, dtype), torch.zeros(1, 3072, dtype=dtype)
            yield f"gemv {capability} {bits}", capability, partial(launch_matmul, x, packed, None)
        for bits, tokens in GEMM_CASES:
            packed, x = zeros(1024, 3072, bits, 32, dtype), torch.zeros(tokens, 3072, dtype=dtype)
            yield f"gemm {capability} {bits} {tokens}", capability, partial(launch_matmul, x, packed, None)
    packed, x = zeros(64, 3072, 4, 32, torch.bfloat16), torch.zeros(8, 3072, dtype=torch.bfloat16)
    yield "gemv 8 tokens", 90, partial(launch_matmul, x, packed, x[0, :64])
    yield "expand", 90, partial(launch_dequantize, packed, torch.bfloat16)
    many = replace(packed, low=packed.low[:1].expand(512, *packed.low.shape[1:]), shape=(16 * 512, 3072))
    yield "gemv of many rows", 90, partial(launch_matmul, x[:1], many, None)
    packed, x = zeros(48, 576, 4, 32, torch.float16), torch.zeros(1, 576, dtype=torch.float16)
    yield "gemv odd", 90, partial(launch_matmul, x, packed, None)


@pytest.fixture(scope="module")
def binaries():
    return compiled(__file__)


def test_nothing_spills_and_everything_fits(binaries):
    assert {len(each) for each in binaries.values()} <= {1, 2}
    for name, each in binaries.items():
        for binary in each:
            assert binary.stack == 0, name
            assert not binary.overwritten, name
            assert binary.shared <= SHARED_LIMIT[binary.capability], name


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("capability", DTYPES)
def test_unpacking_keeps_up_with_memory(binaries, capability, bits):
    (binary,) = binaries[f"gemv {capability} {bits}"]
    (loop,) = binary.main_loops
    # A product of 16 rows by 8 tokens takes 16 columns: 8 weights a thread.
    weights = 8 * loop["HMMA"]
    assert sum(loop.values()) <= MOST_INSTRUCTIONS[capability, bits] * weights
    assert not {"BAR", "LDS", "STS", "SHFL", "LDL", "STL", "I2F", "F2F"} & loop.keys()


@pytest.mark.parametrize(("bits", "passes"), [(4, 1), (6, 1), (8, 2)])
@pytest.mark.parametrize("capability", DTYPES)
def test_a_warp_asks_for_six_chunks_at_once(binaries, capability, bits, passes):
    (loop,) = binaries[f"gemv {capability} {bits}"][0].main_loops
    # 8 warps share 3,072 columns; each product takes 16.
    assert loop["HMMA"] * passes == 3072 // 8 // 16


def test_a_block_of_the_next_layer_finds_room_where_all_slots_are_taken(binaries):
    (binary,) = binaries["gemv of many rows"]
    assert not binary.spills_in_a_main_loop()
    # Two blocks of a processor's slots and one more share its 64 K registers.
    assert 3 * 32 * binary.warps * binary.registers <= 65_536


def test_blocks_come_early_from_hopper_on_and_wait_for_the_kernel_before(binaries):
    for bits in (4, 6, 8):
        early, others = (binaries[f"gemv {capability} {bits}"][0].opcodes for capability in (90, 80))
        # As the assembler calls griddepcontrol's launch_dependents and wait.
        assert early["PREEXIT"] == early["ACQBULK"] == 1
        assert not {"PREEXIT", "ACQBULK"} & others.keys()


@pytest.mark.parametrize(("bits", "loads"), [(4, 6), (6, 0), (8, 6)])
def test_the_first_codes_are_asked_for_before_the_kernel_ahead_has_ended(binaries, bits, loads):
    assert binaries[f"gemv 90 {bits}"][0].early_loads >= loads


@pytest.mark.parametrize(("bits", "tokens"), GEMM_CASES)
@pytest.mark.parametrize("capability", DTYPES)
def test_products_are_the_tensor_cores_and_take_weights_from_registers(binaries, capability, bits, tokens):
    (loop,) = binaries[f"gemm {capability} {bits} {tokens}"][0].main_loops
    assert loop["HGMMA" if capability == 90 and tokens > 64 else "HMMA"]
    # An arrival and a wait go with the products of two fragments; were they one by one, with each.
    assert loop.get("WARPGROUP", 0) <= loop.get("HGMMA", 0)
    assert not {"STS", "SHFL", "LDL", "STL", "I2F", "F2F"} & loop.keys()
