"""What every prefill kernel owes on a CUDA device: norms, padding, odd rows, the same bits again, graphs."""

from functools import partial

import pytest
import torch

from diffquant.family.norm import PairNorm
from diffquant.kernels import arguments
from diffquant.kernels.arguments import empty_output
from diffquant.kernels.attention.prefill import prefill
from diffquant.kernels.attention.prefill_int8 import prefill_int8
from diffquant.kernels.attention.prefill_specialized import prefill_specialized
from tests.support.kernel_inputs import expected, on_call, padding, random_call, relative_error

DEVICE = "cuda"
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

# How far each may be from float64 in float16; those within 2e-3 may be 1e-2 in bfloat16.
KERNELS = {
    "prefill": (on_call(prefill), 2e-3),
    "int8": (partial(on_call(prefill_int8), pv="fp16"), 2e-2),
    "fp8": (partial(on_call(prefill_int8), pv="fp8"), 8e-2),
    "specialized": (partial(on_call(prefill_specialized), bits=16), 2e-3),
    "specialized 8": (partial(on_call(prefill_specialized), bits=8), 8e-2),
}


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    monkeypatch.setattr(arguments, "empty_output", lambda q, width: empty_output(q, width).fill_(torch.nan))


@pytest.fixture(params=KERNELS)
def kernel(request):
    card = torch.cuda.get_device_capability()
    if request.param == "fp8" and card < (8, 9):
        pytest.skip("no e4m3 tensor cores")
    if request.param.startswith("specialized") and card[0] != 9:
        pytest.skip("needs a CUDA device of Hopper's")
    return KERNELS[request.param]


def check(kernel, inputs, width, dtype=torch.float16, wanted=None, **options):
    run, limit = kernel
    out = run(*inputs, scale=width**-0.5, **options)
    wanted = expected(*inputs, scale=width**-0.5, **options) if wanted is None else wanted
    assert relative_error(out, wanted) <= max(limit, 1e-2 if dtype == torch.bfloat16 else 0)


@pytest.mark.parametrize(("width", "dtype"), [(128, torch.bfloat16), (64, torch.float16)], ids=str)
@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_the_pair_norm_is_part_of_the_kernel(kernel, generation, width, dtype):
    inputs = random_call(generation, 300, 300, width=width, dtype=dtype, device=DEVICE)
    post = PairNorm(1e-5, torch.linspace(0.5, 2, inputs[2].shape[-1], device=DEVICE).to(dtype), 0.64)
    check(kernel, inputs, width, dtype, post=post)


@pytest.mark.parametrize("width", [64, 128])
def test_rows_no_descriptor_can_read_are_served(kernel, width):
    q, k, v, lam = random_call("v1", 300, 300, width=width, device=DEVICE)
    check(kernel, (q, k, torch.cat([v.new_zeros(*v.shape[:-1], 1), v], -1)[..., 1:], lam), width)


@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_what_padding_holds_does_not_matter(kernel, generation):
    q, k, v, lam = random_call(generation, 300, 300, width=128, device=DEVICE)
    mask = padding(300, starts=[9], ends=[250], device=DEVICE)
    wanted = expected(q, k, v, lam, scale=128**-0.5, mask=mask)
    for x in {id(x): x for x in (*q, *k, v)}.values():
        x[:, :, :9] = torch.nan
        x[:, :, 250:] = torch.inf
    check(kernel, (q, k, v, lam), 128, wanted=wanted, mask=mask)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_the_same_inputs_give_the_same_bits(kernel, generation, width):
    """What is read before it is there, or overwritten while it is read, is not the same every time."""
    inputs = random_call(generation, 4000, 4000, width=width, pairs=8, kv_pairs=8, dtype=torch.bfloat16, device=DEVICE)
    first = kernel[0](*inputs, scale=width**-0.5)
    for _ in range(19):
        assert torch.equal(kernel[0](*inputs, scale=width**-0.5), first)


@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_a_captured_launch_follows_its_inputs(kernel, generation):
    inputs = random_call(generation, 257, 257, width=128, device=DEVICE)
    kernel[0](*inputs, scale=128**-0.5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel[0](*inputs, scale=128**-0.5)
    inputs[2].mul_(-3)
    graph.replay()
    torch.cuda.synchronize()
    assert relative_error(out, expected(*inputs, scale=128**-0.5)) <= kernel[1]


@pytest.mark.parametrize("kernel", ["prefill", "int8", "fp8"], indirect=True)
def test_a_compiled_model_gives_the_same(kernel):
    inputs = random_call("v1", 129, 129, device=DEVICE)

    def model(q, k, v, lam):
        return kernel[0](q, k, v, lam, scale=0.125) * 2

    assert torch.equal(torch.compile(model, fullgraph=True)(*inputs), model(*inputs))
