"""The prefill kernels on a CUDA device, against the plain form in float64."""

import pytest
import torch

from diffquant.family.norm import PairNorm
from diffquant.kernels.arguments import Visibility, empty_output
from diffquant.kernels.attention import prefill as module
from diffquant.kernels.attention.prefill import prefill, refused
from tests.support.kernel_inputs import expected, limits, random_call, relative_error

DEVICE = "cuda"
LIMITS = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
LONG = 65_536

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    monkeypatch.setattr(module, "empty_output", lambda q, width: empty_output(q, width).fill_(torch.nan))


# (queries, keys, what two sequences see)
SEEN = {
    "causal": (129, 129, Visibility()),
    "causal, in whole tiles": (512, 512, Visibility()),
    "full": (100, 257, Visibility(causal=False)),
    "later part": (17, 1000, Visibility()),
    "more queries than keys": (300, 129, Visibility()),
    "one query": (1, 100, Visibility()),
    "window": (700, 1000, Visibility(window=200)),
    "window of one": (129, 129, Visibility(window=1)),
    "left padding": (300, 300, Visibility(starts=limits([0, 141], DEVICE))),
    "ragged": (500, 500, Visibility(window=300, starts=limits([7, 0], DEVICE), ends=limits([500, 77], DEVICE))),
    "full, ragged": (64, 99, Visibility(causal=False, starts=limits([3, 20], DEVICE), ends=limits([90, 20], DEVICE))),
}


@pytest.mark.parametrize("name", SEEN)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_equals_the_plain_form(generation, dtype, width, name):
    queries, keys, seen = SEEN[name]
    inputs = random_call(
        generation, queries, keys, width=width, pairs=6, kv_pairs=3, batch=2, dtype=dtype, device=DEVICE
    )
    assert refused(*inputs) is None
    out = prefill(*inputs, scale=width**-0.5, seen=seen)
    assert relative_error(out, expected(*inputs, scale=width**-0.5, seen=seen)) <= LIMITS[dtype]


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_the_pair_norm_is_part_of_the_kernel(generation, dtype, width):
    inputs = random_call(generation, 300, 300, width=width, dtype=dtype, device=DEVICE)
    values = inputs[2].shape[-1]
    post = PairNorm(1e-5, torch.linspace(0.5, 2, values, device=DEVICE).to(dtype), 0.64)
    out = prefill(*inputs, scale=width**-0.5, seen=Visibility(), post=post)
    assert relative_error(out, expected(*inputs, scale=width**-0.5, seen=Visibility(), post=post)) <= LIMITS[dtype]


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_rows_no_descriptor_can_read_are_served(generation, width):
    q, k, v, lam = random_call(generation, 300, 300, width=width, device=DEVICE)
    v = torch.cat([v.new_zeros(*v.shape[:-1], 1), v], -1)[..., 1:]
    out = prefill(q, k, v, lam, scale=width**-0.5, seen=Visibility())
    assert relative_error(out, expected(q, k, v, lam, scale=width**-0.5, seen=Visibility())) <= LIMITS[torch.float16]


@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_what_padding_holds_does_not_matter(generation):
    q, k, v, lam = random_call(generation, 300, 300, device=DEVICE)
    seen = Visibility(starts=limits([9], DEVICE), ends=limits([250], DEVICE))
    wanted = expected(q, k, v, lam, scale=0.125, seen=seen)
    for x in {id(x): x for x in (*q, *k, v)}.values():
        x[:, :, :9] = torch.nan
        x[:, :, 250:] = torch.inf
    assert relative_error(prefill(q, k, v, lam, scale=0.125, seen=seen), wanted) <= LIMITS[torch.float16]


@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_long_contexts_take_memory_for_the_output_alone(generation):
    q, k, v, lam = random_call(generation, LONG, LONG, width=128, dtype=torch.bfloat16, device=DEVICE)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = prefill(q, k, v, lam, scale=128**-0.5, seen=Visibility())
    # Hopper's descriptors: at most three of 128 bytes a tile of 64 queries.
    beside = 3 * 128 * 2 * LONG // 64 + (1 << 20)
    assert torch.cuda.max_memory_allocated() - before <= out.numel() * out.element_size() + beside
    for part in (slice(0, 64), slice(LONG - 64, LONG)):
        # The first queries of a causal sequence are the last of its beginning.
        ends = part.stop
        some = [x[:, :, part] for x in q], [x[:, :, :ends] for x in k], v[:, :, :ends]
        weight = lam if lam.dim() == 0 else lam[:, :, part]
        wanted = expected(*some, weight, scale=128**-0.5, seen=Visibility())
        assert relative_error(out[:, :, part], wanted) <= LIMITS[torch.bfloat16]


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_the_same_inputs_give_the_same_bits(generation, width):
    inputs = random_call(generation, 2000, 2000, width=width, pairs=8, kv_pairs=8, dtype=torch.bfloat16, device=DEVICE)
    first = prefill(*inputs, scale=width**-0.5, seen=Visibility())
    for _ in range(9):
        assert torch.equal(prefill(*inputs, scale=width**-0.5, seen=Visibility()), first)


@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_a_captured_launch_follows_its_inputs(generation):
    q, k, v, lam = random_call(generation, 257, 257, device=DEVICE)
    prefill(q, k, v, lam, scale=0.125, seen=Visibility())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = prefill(q, k, v, lam, scale=0.125, seen=Visibility())
    v.mul_(-3)
    graph.replay()
    torch.cuda.synchronize()
    assert relative_error(out, expected(q, k, v, lam, scale=0.125, seen=Visibility())) <= LIMITS[torch.float16]


def test_a_compiled_model_gives_the_same():
    inputs = random_call("v1", 129, 129, device=DEVICE)

    def model(q, k, v, lam):
        return prefill(q, k, v, lam, scale=0.125, seen=Visibility(window=50)) * 2

    assert torch.equal(torch.compile(model, fullgraph=True)(*inputs), model(*inputs))
