"""The prefill kernels on a CUDA device, against the plain form in float64."""

import pytest
import torch

from diffquant.family.call import AttentionCall
from diffquant.kernels import arguments
from diffquant.kernels.arguments import empty_output
from diffquant.kernels.attention import prefill as module
from diffquant.kernels.attention.prefill import prefill_refusal
from tests.gpu.seen import SEEN
from tests.support.kernel_inputs import CAUSAL, expected, on_call, random_call, relative_error

DEVICE = "cuda"
prefill = on_call(module.prefill)
LIMITS = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
LONG = 65_536


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    monkeypatch.setattr(arguments, "empty_output", lambda q, width: empty_output(q, width).fill_(torch.nan))


@pytest.mark.parametrize("name", SEEN)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_equals_the_plain_form(generation, dtype, width, name):
    queries, keys, mask = SEEN[name]
    inputs = random_call(
        generation, queries, keys, width=width, pairs=6, kv_pairs=3, batch=2, dtype=dtype, device=DEVICE
    )
    assert prefill_refusal(AttentionCall(*inputs, scale=0.125, mask=CAUSAL)) is None
    out = prefill(*inputs, scale=width**-0.5, mask=mask)
    assert relative_error(out, expected(*inputs, scale=width**-0.5, mask=mask)) <= LIMITS[dtype]


@pytest.mark.parametrize("width", [64, 128])
def test_maps_that_cancel_keep_what_bfloat16_can_say(width):
    q, k, v, _ = random_call("v1", 300, 300, width=width, dtype=torch.bfloat16, device=DEVICE)
    # The maps are nearly the same: what remains is two fifths of the noise map.
    inputs = [q[1] + 0.2 * q[0], q[1]], [k[1] + 0.2 * k[0], k[1]], v, torch.tensor(0.8, device=DEVICE)
    wanted = expected(*inputs, scale=width**-0.5)
    # Emulated in float64, weights and output in bfloat16 give 5.2e-3; 6.7e-3 if the noise map waits in bfloat16 too.
    assert relative_error(prefill(*inputs, scale=width**-0.5), wanted) <= 5.9e-3


@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_long_contexts_take_memory_for_the_output_alone(generation):
    q, k, v, lam = random_call(generation, LONG, LONG, width=128, dtype=torch.bfloat16, device=DEVICE)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = prefill(q, k, v, lam, scale=128**-0.5)
    # Hopper's descriptors: at most three of 128 bytes a tile of 64 queries.
    beside = 3 * 128 * 2 * LONG // 64 + (1 << 20)
    assert torch.cuda.max_memory_allocated() - before <= out.numel() * out.element_size() + beside
    for part in (slice(0, 64), slice(LONG - 64, LONG)):
        # The first queries of a causal sequence are the last of its beginning.
        ends = part.stop
        some = [x[:, :, part] for x in q], [x[:, :, :ends] for x in k], v[:, :, :ends]
        weight = lam if lam.dim() == 0 else lam[:, :, part]
        wanted = expected(*some, weight, scale=128**-0.5)
        assert relative_error(out[:, :, part], wanted) <= LIMITS[torch.bfloat16]
