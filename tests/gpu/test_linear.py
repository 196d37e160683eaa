"""Weight-only linear kernels on a CUDA device. Needs torch, triton, numpy and pytest alone."""

from functools import lru_cache

import pytest
import torch

from diffquant.kernels.gpu import multiprocessors
from diffquant.kernels.linear.gemm import launch_dequantize
from diffquant.kernels.linear.linear import launch_matmul, linear, packed_linear
from diffquant.kernels.linear.repack import dequantize_weight
from diffquant.model.linears import QuantizedLinear
from tests.support.packed_weights import poison, random_activations, random_case, random_floats, relative_error

DEVICE = "cuda"

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    poison(monkeypatch)


# Made on the host, which takes longer than all the products with it.
last_case = lru_cache(1)(random_case)
LIMITS = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
SHAPES = [
    # rows, columns, group
    (33, 576, 32),
    (47, 1344, 96),
    (3072, 3072, 128),
    (576, 1536, 64),
    (130, 320, 16),
    (200, 144, 48),
    (50, 70, "row"),
    (1000, 1024, "tensor"),
]


def check(y, x, exact, dtype, bias=0):
    expected = x.double() @ exact.T + bias
    assert y.dtype == dtype
    assert relative_error(y, expected) <= LIMITS[dtype]
    cosine = torch.nn.functional.cosine_similarity(y.double().flatten(), expected.flatten(), 0)
    assert cosine >= 1 - LIMITS[dtype] ** 2


@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 33, 100, 513])
@pytest.mark.parametrize(("rows", "width", "group"), SHAPES)
@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_kernels_equal_float64(dtype, bits, rows, width, group, tokens):
    packed, exact = last_case(rows, width, bits, group, dtype, DEVICE)
    x = random_activations(tokens, width, dtype, DEVICE)
    # Kernels are compiled for each; a bias is added in float32, whatever the weights' type.
    bias = random_activations(1, rows, dtype, DEVICE, seed=3)[0] if dtype == torch.float16 else None
    check(launch_matmul(x, packed, bias), x, exact, dtype, 0 if bias is None else bias.double())


@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 100, 513])
@pytest.mark.parametrize(("rows", "width"), [(33, 576), (1000, 1024), (3072, 3072)])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_floats_under_scales_of_a_byte_equal_float64(dtype, name, rows, width, tokens):
    packed, exact = random_floats(rows, width, name, DEVICE)
    x = random_activations(tokens, width, dtype, DEVICE)
    check(launch_matmul(x, packed, None), x, exact, dtype)


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize(("width", "kind"), [(1024, 4), (3072, 4), (1536, "nvfp4")])
def test_programs_of_several_row_blocks_ask_for_words_ahead(width, kind, tokens):
    # Each program of some has another block to compute.
    rows = 16 * (2 * multiprocessors(torch.device(DEVICE)) + 5) - 3
    packed, exact = (
        random_floats(rows, width, kind, DEVICE) if kind != 4 else last_case(rows, width, 4, 128, device=DEVICE)
    )
    x = random_activations(tokens, width, torch.float16, DEVICE)
    check(launch_matmul(x, packed, None), x, exact, torch.float16)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_floats_are_written_out_as_they_are_decoded(name, dtype):
    packed, _ = random_floats(333, 1344, name, DEVICE)
    assert torch.equal(launch_dequantize(packed, dtype), dequantize_weight(packed, dtype))


@pytest.mark.parametrize("bits", [2, 3, 5, 7])
def test_codes_in_the_next_wider_container(bits):
    packed, exact = random_case(96, 512, bits, 128, torch.float16, DEVICE)
    for tokens in (1, 40):
        x = random_activations(tokens, 512, device=DEVICE)
        check(launch_matmul(x, packed, None), x, exact, torch.float16)


@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_a_layer_waits_for_the_one_whose_output_it_takes(bits, tokens):
    """From Hopper on it begins while that one still runs."""
    first, _ = random_case(96, 512, bits, 128, torch.float16, DEVICE)
    second, exact = random_case(33, 96, bits, 32, torch.float16, DEVICE)
    y = linear(random_activations(tokens, 512, device=DEVICE), first)
    check(linear(y, second), y, exact, torch.float16)


@pytest.mark.parametrize("tokens", [1, 8, 64, 1024, 4096])
@pytest.mark.parametrize(("rows", "width"), [(8192, 3072), (3072, 8192)])
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_a_3b_models_layers(bits, rows, width, tokens):
    packed, exact = last_case(rows, width, bits, 128, torch.bfloat16, DEVICE)
    x = random_activations(tokens, width, torch.bfloat16, DEVICE)
    check(linear(x, packed), x, exact, torch.bfloat16)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, "row"), (6, 64), (8, 16), (8, "tensor")])
def test_expanded_weights_are_the_checkpoints(bits, group, dtype):
    packed, _ = random_case(333, 1344, bits, group, dtype, DEVICE)
    assert torch.equal(launch_dequantize(packed, dtype), dequantize_weight(packed, dtype))


def test_activations_of_any_strides():
    packed, exact = random_case(200, 192, 4, 32, torch.float16, DEVICE)
    for tokens in (2, 40):
        wide = random_activations(tokens, 2 * 192, device=DEVICE)
        for x in (wide[:, ::2], wide[:, 5:197], wide[:, :192].T.contiguous().T, wide[:0, :192]):
            y = linear(x, packed)
            assert y.shape == (len(x), 200)
            if len(x):
                check(y, x, exact, torch.float16)


@pytest.mark.parametrize("tokens", [1, 16, 40, 300])
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_the_same_inputs_give_the_same_bits(bits, tokens):
    packed, _ = random_case(3072, 3072, bits, 32, torch.float16, DEVICE)
    x = random_activations(tokens, 3072, device=DEVICE)
    first = linear(x, packed)
    for _ in range(10):
        assert torch.equal(linear(x, packed), first)


@pytest.mark.parametrize("tokens", [1, 40])
def test_launches_are_captured_in_a_graph(tokens):
    packed, _ = random_case(1024, 3072, 4, 32, torch.float16, DEVICE)
    x = random_activations(tokens, 3072, device=DEVICE)
    linear(x, packed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear(x, packed)
    x.mul_(-2)
    graph.replay()
    assert torch.equal(y, linear(x, packed))


def test_decoding_takes_no_memory_but_the_outputs():
    packed, _ = random_case(8192, 3072, 4, 32, torch.float16, DEVICE)
    x = random_activations(1, 3072, device=DEVICE)
    linear(x, packed)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear(x, packed)
    assert torch.cuda.max_memory_allocated() - before <= 8192 * 2 + 1024


@pytest.mark.parametrize("tokens", [1, 40])
def test_a_compiled_layer_equals_itself(tokens):
    layer = QuantizedLinear(random_case(200, 192, 6, 32, torch.float16, DEVICE)[0])
    x = random_activations(tokens, 192, device=DEVICE)
    assert torch.equal(torch.compile(layer, fullgraph=True)(x), layer(x))


def test_the_op_passes_opcheck():
    p, _ = random_case(24, 96, 4, 32, torch.float16, DEVICE)
    for tokens in (2, 20):
        x = random_activations(tokens, 96, device=DEVICE)
        arguments = (x, p.low, p.high, p.scales, p.row_scale, None, p.bits, p.group, 24)
        torch.library.opcheck(packed_linear, arguments)
