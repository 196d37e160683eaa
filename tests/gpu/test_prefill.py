"""The prefill kernels on a CUDA device, against the plain form in float64."""

import pytest
import torch

from diffquant.family.call import AttentionCall
from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm
from diffquant.kernels import arguments
from diffquant.kernels.arguments import empty_output
from diffquant.kernels.attention import prefill as module
from diffquant.kernels.attention.prefill import prefill_refusal
from tests.support.kernel_inputs import CAUSAL, expected, on_call, padding, random_call, relative_error

DEVICE = "cuda"
prefill = on_call(module.prefill)
LIMITS = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
LONG = 65_536

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    monkeypatch.setattr(arguments, "empty_output", lambda q, width: empty_output(q, width).fill_(torch.nan))


# (queries, keys, what two sequences see)
SEEN = {
    "causal": (129, 129, Mask()),
    "causal, in whole tiles": (512, 512, Mask()),
    "later part": (17, 1000, Mask()),
    "more queries than keys": (300, 129, Mask()),
    "one query": (1, 100, Mask()),
    "left padding": (300, 300, padding(300, starts=[0, 141], device=DEVICE)),
    "ragged": (500, 500, padding(500, starts=[7, 0], ends=[500, 77], device=DEVICE)),
    "ragged, one empty": (64, 99, padding(99, starts=[3, 20], ends=[90, 20], device=DEVICE)),
}


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


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_the_pair_norm_is_part_of_the_kernel(generation, dtype, width):
    inputs = random_call(generation, 300, 300, width=width, dtype=dtype, device=DEVICE)
    values = inputs[2].shape[-1]
    post = PairNorm(1e-5, torch.linspace(0.5, 2, values, device=DEVICE).to(dtype), 0.64)
    out = prefill(*inputs, scale=width**-0.5, post=post)
    assert relative_error(out, expected(*inputs, scale=width**-0.5, post=post)) <= LIMITS[dtype]


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_rows_no_descriptor_can_read_are_served(generation, width):
    q, k, v, lam = random_call(generation, 300, 300, width=width, device=DEVICE)
    v = torch.cat([v.new_zeros(*v.shape[:-1], 1), v], -1)[..., 1:]
    out = prefill(q, k, v, lam, scale=width**-0.5)
    assert relative_error(out, expected(q, k, v, lam, scale=width**-0.5)) <= LIMITS[torch.float16]


@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_what_padding_holds_does_not_matter(generation):
    q, k, v, lam = random_call(generation, 300, 300, device=DEVICE)
    mask = padding(300, starts=[9], ends=[250], device=DEVICE)
    wanted = expected(q, k, v, lam, scale=0.125, mask=mask)
    for x in {id(x): x for x in (*q, *k, v)}.values():
        x[:, :, :9] = torch.nan
        x[:, :, 250:] = torch.inf
    assert relative_error(prefill(q, k, v, lam, scale=0.125, mask=mask), wanted) <= LIMITS[torch.float16]


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


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_the_same_inputs_give_the_same_bits(generation, width):
    inputs = random_call(generation, 2000, 2000, width=width, pairs=8, kv_pairs=8, dtype=torch.bfloat16, device=DEVICE)
    first = prefill(*inputs, scale=width**-0.5)
    for _ in range(9):
        assert torch.equal(prefill(*inputs, scale=width**-0.5), first)


@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_a_captured_launch_follows_its_inputs(generation):
    q, k, v, lam = random_call(generation, 257, 257, device=DEVICE)
    prefill(q, k, v, lam, scale=0.125)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = prefill(q, k, v, lam, scale=0.125)
    v.mul_(-3)
    graph.replay()
    torch.cuda.synchronize()
    assert relative_error(out, expected(q, k, v, lam, scale=0.125)) <= LIMITS[torch.float16]


def test_a_compiled_model_gives_the_same():
    inputs = random_call("v1", 129, 129, device=DEVICE)

    def model(q, k, v, lam):
        return prefill(q, k, v, lam, scale=0.125) * 2

    assert torch.equal(torch.compile(model, fullgraph=True)(*inputs), model(*inputs))
