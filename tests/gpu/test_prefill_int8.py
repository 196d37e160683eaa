"""8-bit attention on a CUDA device, against the plain form in float64."""

import pytest
import torch

from diffquant.family.call import AttentionCall
from diffquant.kernels import arguments
from diffquant.kernels.arguments import empty_output
from diffquant.kernels.attention import prefill_int8 as module
from diffquant.kernels.attention.prefill_int8 import prefill_int8_refusal
from tests.gpu.seen import SEEN
from tests.support.kernel_inputs import CAUSAL, expected, on_call, random_call, relative_error

DEVICE = "cuda"
prefill_int8 = on_call(module.prefill_int8)
LIMITS = {"fp16": 2e-2, "fp8": 8e-2}
# Every kernel is compiled anew for each, at a second or more.
WIDTHS = [(128, torch.float16), (64, torch.bfloat16)]
LONG = 65_536


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    monkeypatch.setattr(arguments, "empty_output", lambda q, width: empty_output(q, width).fill_(torch.nan))


@pytest.fixture(params=LIMITS)
def pv(request):
    if request.param == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no e4m3 tensor cores")
    return request.param


def cosine(out, wanted):
    return float(torch.cosine_similarity(out.double().flatten(), wanted.flatten(), 0))


@pytest.mark.parametrize("name", SEEN)
@pytest.mark.parametrize(("width", "dtype"), WIDTHS, ids=str)
@pytest.mark.parametrize("generation", ["plain", "v1", "v2"])
def test_close_to_the_plain_form(generation, dtype, width, name, pv):
    queries, keys, mask = SEEN[name]
    inputs = random_call(
        generation, queries, keys, width=width, pairs=6, kv_pairs=3, batch=2, dtype=dtype, device=DEVICE
    )
    assert prefill_int8_refusal(AttentionCall(*inputs, scale=0.125, mask=CAUSAL), pv) is None
    out = prefill_int8(*inputs, scale=width**-0.5, mask=mask, pv=pv)
    wanted = expected(*inputs, scale=width**-0.5, mask=mask)
    assert relative_error(out, wanted) <= LIMITS[pv]
    assert cosine(out, wanted) >= 1 - LIMITS[pv] ** 2


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_a_constant_offset_of_keys_costs_nothing(generation, width, pv):
    q, k, v, lam = random_call(generation, 700, 700, width=width, device=DEVICE)
    offset = 20 * torch.randn(width, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))
    moved = {id(x): (x + offset).half() for x in k}
    k = [moved[id(x)] for x in k]
    out = prefill_int8(q, k, v, lam, scale=width**-0.5, pv=pv)
    assert relative_error(out, expected(q, k, v, lam, scale=width**-0.5)) <= LIMITS[pv]


@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_long_contexts_take_memory_for_the_codes_and_the_output(generation, pv):
    q, k, v, lam = random_call(generation, LONG, LONG, width=128, dtype=torch.bfloat16, device=DEVICE)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = prefill_int8(q, k, v, lam, scale=128**-0.5, pv=pv)
    codes = sum(x.numel() for x in {id(x): x for x in (*q, *k, v)}.values())
    # Scales and partial statistics take a few percent of the codes.
    allowed = out.numel() * out.element_size() + codes * 1.1 + (1 << 20)
    assert torch.cuda.max_memory_allocated() - before <= allowed
    some = [x[:, :, -64:] for x in q], k, v, lam if lam.dim() == 0 else lam[:, :, -64:]
    wanted = expected(*some, scale=128**-0.5)
    assert relative_error(out[:, :, -64:], wanted) <= LIMITS[pv]


@pytest.mark.parametrize("width", [64, 128])
def test_long_sums_keep_their_precision(width, pv):
    """Equal weights of equal values: every product is exact, so an accumulator that drops bits is all that errs."""
    q, k, v, lam = random_call("v1", 128, LONG, width=width, device=DEVICE)
    out = prefill_int8([x * 0 for x in q], k, torch.ones_like(v), lam, scale=0.1, pv=pv)
    torch.testing.assert_close(out, torch.full_like(out, 1 - 0.37), rtol=2e-3, atol=0)
