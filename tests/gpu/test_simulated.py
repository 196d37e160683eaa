"""Simulated logits on a CUDA device: the codes of the plain form, at their borders too."""

import pytest
import torch

from diffquant.attention import LogitMeter
from diffquant.attention.backends import blocks as in_blocks
from diffquant.attention.naive import naive
from diffquant.family.call import AttentionCall
from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm
from diffquant.kernels import arguments
from diffquant.kernels.arguments import empty_output
from diffquant.kernels.attention import prefill_simulated as module
from diffquant.kernels.attention.prefill_simulated import prefill_simulated_refusal
from diffquant.recipe.scheme import Scheme
from tests.support.kernel_inputs import (
    expected_of_rounded,
    normed,
    on_call,
    padding,
    random_call,
    relative_error,
    steps_of_two,
)

DEVICE = "cuda"
simulated, blocked = on_call(module.prefill_simulated), on_call(in_blocks.attend_by_blocks)
LIMITS = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
# Every kernel is compiled anew for each, at a second or more.
WIDTHS = [(128, torch.float16), (64, torch.bfloat16)]
LONG = 65_536

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    monkeypatch.setattr(arguments, "empty_output", lambda q, width: empty_output(q, width).fill_(torch.nan))


@pytest.fixture(autouse=True)
def _whole_float32_products():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


SEEN = {
    "causal": (129, 129, Mask()),
    "causal, in whole tiles": (512, 512, Mask()),
    "more queries than keys": (300, 129, Mask()),
    "one query": (1, 100, Mask()),
    "ragged": (500, 500, padding(500, starts=[7, 0], ends=[500, 77], device=DEVICE)),
    "ragged, one empty": (64, 99, padding(99, starts=[3, 20], ends=[90, 20], device=DEVICE)),
}


def whole_numbers(generation, queries, keys, **shape):
    """Inputs whose dot products float32 holds exactly, in any order of summation."""
    q, k, v, lam = random_call(generation, queries, keys, device=DEVICE, **shape)
    rounded = {id(x): x.mul(2).round() for x in k}
    return [x.mul(2).round() for x in q], [rounded[id(x)] for x in k], v, lam


def plain(q, k, v, lam, scale, mask, scheme):
    """The plain form, its values in float64 and its logits in float32."""
    return naive(AttentionCall(q, k, v, lam, scale=scale, mask=mask, logits=scheme)).double()


@pytest.mark.parametrize("name", SEEN)
@pytest.mark.parametrize("text", ["4:row", "6:tensor:shift", "3:pair", "8:head:shift"])
@pytest.mark.parametrize(("width", "dtype"), WIDTHS, ids=str)
@pytest.mark.parametrize("generation", ["plain", "v1", "v2"])
def test_equals_the_plain_form_at_every_border(generation, dtype, width, text, name):
    queries, keys, mask = SEEN[name]
    inputs = whole_numbers(generation, queries, keys, width=width, pairs=6, kv_pairs=3, batch=2, dtype=dtype)
    scheme = Scheme.parse(text)
    assert prefill_simulated_refusal(AttentionCall(*inputs, scale=0.125, mask=mask, logits=scheme)) is None
    out = simulated(*inputs, scale=width**-0.5, mask=mask, scheme=scheme)
    assert relative_error(out, plain(*inputs, width**-0.5, mask, scheme)) <= LIMITS[dtype]


@pytest.mark.parametrize("text", ["mxfp4", "mxfp6_up", "mxfp8", "nvfp4", "nvfp4:fullsum"])
@pytest.mark.parametrize("logits", ["16", "8:row"])
@pytest.mark.parametrize(("width", "dtype"), WIDTHS, ids=str)
@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_weights_in_blocks_are_rounded_as_the_plain_form_rounds_them(generation, width, dtype, logits, text):
    inputs = whole_numbers(generation, 129, 200, width=width, pairs=6, kv_pairs=3, dtype=dtype)
    schemes = {"logits": Scheme.parse(logits), "p": Scheme.parse(text)}
    call = AttentionCall(*inputs, scale=width**-0.5, mask=Mask(), **schemes)
    assert relative_error(module.prefill_simulated(call), naive(call).double()) <= LIMITS[dtype]


@pytest.mark.parametrize(
    ("qk", "logits", "p"), [("8:row", "8:row", "16"), ("4:row", "16", "e4m3:row"), ("mxfp8", "16", "mxfp4")]
)
@pytest.mark.parametrize(("width", "dtype"), WIDTHS, ids=str)
@pytest.mark.parametrize("generation", ["plain", "v1", "v2"])
def test_queries_and_keys_are_rounded_as_before_the_plain_form(generation, width, dtype, qk, logits, p):
    shape = {"width": width, "pairs": 6, "kv_pairs": 3, "dtype": dtype, "device": DEVICE}
    inputs = steps_of_two(*random_call(generation, 100, 170, **shape), Scheme.parse(qk))
    schemes = {"logits": Scheme.parse(logits), "p": Scheme.parse(p)}
    call = AttentionCall(*inputs, scale=width**-0.5, mask=Mask(), qk=Scheme.parse(qk), **schemes)
    wanted = expected_of_rounded(*inputs, width**-0.5, Mask(), Scheme.parse(qk), **schemes)
    assert relative_error(module.prefill_simulated(call), wanted) <= LIMITS[dtype]


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("granularity", ["tensor", "head", "pair", "row"])
@pytest.mark.parametrize("shift", ["", ":shift"], ids=["absmax", "shift"])
def test_the_meter_counts_as_the_blocked_form(shift, granularity, bits):
    inputs = whole_numbers("v1", 300, 300, batch=2)
    mask, scheme = padding(300, starts=[0, 41], device=DEVICE), Scheme.parse(f"{bits}:{granularity}{shift}")
    ours, theirs = LogitMeter(), LogitMeter()
    simulated(*inputs, scale=0.5, mask=mask, scheme=scheme, meter=ours)
    blocked(*inputs, scale=0.5, mask=mask, scheme=scheme, meter=theirs)
    assert ours.report() == pytest.approx(theirs.report(), rel=1e-6)


def test_nothing_waits_for_the_device():
    inputs = whole_numbers("v1", 300, 300)
    scheme, meter = Scheme.parse("4:row:shift"), LogitMeter()
    call = {"scale": 0.125, "mask": Mask(), "scheme": scheme, "meter": meter}
    simulated(*inputs, **call)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        simulated(*inputs, **call)
        blocked(*inputs, **call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert meter.report()["calls"] == 3


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("generation", ["plain", "v1", "v2"])
def test_any_numbers_stay_close(generation, dtype):
    inputs = random_call(generation, 700, 700, width=128, dtype=dtype, device=DEVICE)
    scheme = Scheme.parse("8:row")
    out = simulated(*inputs, scale=128**-0.5, scheme=scheme)
    # Sums in another order may cross a border between codes.
    assert relative_error(out, plain(*inputs, 128**-0.5, Mask(), scheme)) <= 1e-2


@pytest.mark.parametrize("width", [64, 128])
def test_the_pair_norm_is_part_of_the_kernel(width):
    inputs = whole_numbers("v1", 300, 300, width=width)
    post = PairNorm(1e-5, torch.linspace(0.5, 2, 2 * width, device=DEVICE).half(), 0.64)
    scheme = Scheme.parse("6:head")
    out = simulated(*inputs, scale=width**-0.5, scheme=scheme, post=post)
    wanted = normed(plain(*inputs, width**-0.5, Mask(), scheme), post)
    assert relative_error(out, wanted) <= LIMITS[torch.float16]


def test_rows_no_descriptor_can_read_are_served():
    q, k, v, lam = whole_numbers("v1", 300, 300)
    v = torch.cat([v.new_zeros(*v.shape[:-1], 1), v], -1)[..., 1:]
    out = simulated(q, k, v, lam, scale=0.125, scheme=Scheme.parse("4:row"))
    wanted = plain(q, k, v, lam, 0.125, Mask(), Scheme.parse("4:row"))
    assert relative_error(out, wanted) <= LIMITS[torch.float16]


@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_long_contexts_take_memory_for_the_output_and_a_few_numbers_a_row(generation):
    q, k, v, lam = random_call(generation, LONG, LONG, width=128, dtype=torch.bfloat16, device=DEVICE)
    scheme = Scheme.parse("8:row")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = simulated(q, k, v, lam, scale=128**-0.5, scheme=scheme)
    rows = out.shape[1] * LONG * 2
    allowed = out.numel() * out.element_size() + 64 * rows + (1 << 21)
    assert torch.cuda.max_memory_allocated() - before <= allowed
    some = [x[:, :, -64:] for x in q], k, v, lam if lam.dim() == 0 else lam[:, :, -64:]
    wanted = plain(*some, 128**-0.5, Mask(), scheme)
    assert relative_error(out[:, :, -64:], wanted) <= LIMITS[torch.bfloat16]


@pytest.mark.parametrize("width", [64, 128])
def test_the_same_inputs_give_the_same_bits(width):
    inputs = random_call("v1", 2000, 2000, width=width, pairs=8, kv_pairs=8, dtype=torch.bfloat16, device=DEVICE)
    call = {"scale": width**-0.5, "mask": Mask(), "scheme": Scheme.parse("4:pair:shift")}
    first = simulated(*inputs, **call)
    for _ in range(9):
        assert torch.equal(simulated(*inputs, **call), first)
