"""Warp-specialized attention on a Hopper device, against the plain form in float64."""

import pytest
import torch

from diffquant.attention.naive import naive
from diffquant.family.call import AttentionCall
from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm
from diffquant.kernels import arguments
from diffquant.kernels.arguments import empty_output
from diffquant.kernels.attention import prefill_specialized as module
from diffquant.kernels.attention.prefill_simulated import prefill_simulated
from diffquant.kernels.attention.prefill_specialized import prefill_specialized_refusal
from diffquant.recipe.scheme import Scheme
from tests.support.kernel_inputs import CAUSAL, expected, on_call, padding, random_call, relative_error

DEVICE = "cuda"
prefill_specialized, simulated = on_call(module.prefill_specialized), on_call(prefill_simulated)
LIMITS = {16: 2e-3, 8: 8e-2}
CASES = [("v1", 16), ("v2", 16), ("plain", 8), ("v1", 8), ("v2", 8)]
IDS = [f"{generation}-{bits}-bit" for generation, bits in CASES]
# Every kernel is compiled anew for each, at some seconds.
WIDTHS = [(128, torch.float16), (64, torch.bfloat16)]
LONG = 65_536

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
if torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a CUDA device of Hopper's", allow_module_level=True)


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
    # Rows that see nothing share a tile with those that see whole blocks.
    "right padding": (300, 300, padding(300, ends=[300, 200], device=DEVICE)),
    "ragged": (500, 500, padding(500, starts=[7, 0], ends=[500, 77], device=DEVICE)),
    "ragged, one empty": (64, 99, padding(99, starts=[3, 20], ends=[90, 20], device=DEVICE)),
}


def limit(bits, dtype):
    return 1e-2 if bits == 16 and dtype == torch.bfloat16 else LIMITS[bits]


@pytest.mark.parametrize("name", SEEN)
@pytest.mark.parametrize(("width", "dtype"), WIDTHS, ids=str)
@pytest.mark.parametrize(("generation", "bits"), CASES, ids=IDS)
def test_close_to_the_plain_form(generation, bits, width, dtype, name):
    queries, keys, mask = SEEN[name]
    inputs = random_call(
        generation, queries, keys, width=width, pairs=6, kv_pairs=3, batch=2, dtype=dtype, device=DEVICE
    )
    assert prefill_specialized_refusal(AttentionCall(*inputs, scale=0.125, mask=CAUSAL), bits) is None
    out = prefill_specialized(*inputs, scale=width**-0.5, mask=mask, bits=bits)
    assert relative_error(out, expected(*inputs, scale=width**-0.5, mask=mask)) <= limit(bits, dtype)


@pytest.mark.parametrize(("generation", "bits"), CASES, ids=IDS)
def test_the_pair_norm_is_part_of_the_kernel(generation, bits):
    inputs = random_call(generation, 300, 300, width=128, dtype=torch.bfloat16, device=DEVICE)
    post = PairNorm(1e-5, torch.linspace(0.5, 2, inputs[2].shape[-1], device=DEVICE).bfloat16(), 0.64)
    out = prefill_specialized(*inputs, scale=128**-0.5, post=post, bits=bits)
    assert relative_error(out, expected(*inputs, scale=128**-0.5, post=post)) <= limit(bits, torch.bfloat16)


@pytest.mark.parametrize(("generation", "bits"), CASES, ids=IDS)
def test_what_padding_holds_does_not_matter(generation, bits):
    q, k, v, lam = random_call(generation, 300, 300, width=128, device=DEVICE)
    mask = padding(300, starts=[9], ends=[250], device=DEVICE)
    wanted = expected(q, k, v, lam, scale=0.0625, mask=mask)
    for x in {id(x): x for x in (*q, *k, v)}.values():
        x[:, :, :9] = torch.nan
        x[:, :, 250:] = torch.inf
    out = prefill_specialized(q, k, v, lam, scale=0.0625, mask=mask, bits=bits)
    assert relative_error(out, wanted) <= LIMITS[bits]


@pytest.mark.parametrize(("generation", "bits"), CASES, ids=IDS)
def test_the_same_inputs_give_the_same_bits(generation, bits):
    """What is read before it is there, or overwritten while it is read, is not the same every time."""
    inputs = random_call(generation, 4000, 4000, width=128, pairs=8, kv_pairs=8, dtype=torch.bfloat16, device=DEVICE)
    first = prefill_specialized(*inputs, scale=128**-0.5, bits=bits)
    for _ in range(19):
        assert torch.equal(prefill_specialized(*inputs, scale=128**-0.5, bits=bits), first)


@pytest.mark.parametrize(("generation", "bits"), CASES, ids=IDS)
def test_long_contexts_are_right_at_both_ends(generation, bits):
    q, k, v, lam = random_call(generation, LONG, LONG, width=128, dtype=torch.bfloat16, device=DEVICE)
    out = prefill_specialized(q, k, v, lam, scale=128**-0.5, bits=bits)
    assert out.isfinite().all()
    for part in (slice(0, 64), slice(LONG - 64, LONG)):
        # The first queries of a causal sequence are the last of its beginning.
        some = [x[:, :, part] for x in q], [x[:, :, : part.stop] for x in k], v[:, :, : part.stop]
        weight = lam if lam is None or lam.dim() == 0 else lam[:, :, part]
        wanted = expected(*some, weight, scale=128**-0.5)
        assert relative_error(out[:, :, part], wanted) <= limit(bits, torch.bfloat16)


@pytest.mark.parametrize("bits", LIMITS)
def test_a_captured_launch_follows_its_inputs(bits):
    q, k, v, lam = random_call("v1", 257, 257, width=128, device=DEVICE)
    prefill_specialized(q, k, v, lam, scale=0.0625, bits=bits)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = prefill_specialized(q, k, v, lam, scale=0.0625, bits=bits)
    v.mul_(-3)
    graph.replay()
    torch.cuda.synchronize()
    assert relative_error(out, expected(q, k, v, lam, scale=0.0625)) <= LIMITS[bits]


@pytest.mark.parametrize("name", SEEN)
@pytest.mark.parametrize("text", ["8:row", "4:row:shift", "6:tensor"])
@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_rounded_logits_fall_on_the_codes_of_the_plain_form(generation, text, name):
    queries, keys, mask = SEEN[name]
    q, k, v, lam = random_call(generation, queries, keys, width=128, batch=2, device=DEVICE)
    # Whole numbers: float32 holds their products exactly, in any order of summation. Scaled they reach 20, whose
    # exponential float16 does not hold.
    rounded = {id(x): x.mul(2).round() for x in k}
    inputs = [x.mul(2).round() for x in q], [rounded[id(x)] for x in k], v, lam
    scheme = Scheme.parse(text)
    out = simulated(*inputs, scale=0.125, mask=mask, scheme=scheme, specialized=True)
    wanted = naive(AttentionCall(*inputs, scale=0.125, mask=mask, logits=scheme)).double()
    assert relative_error(out, wanted) <= LIMITS[16]
