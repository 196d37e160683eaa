"""Simulated logits, interpreted, against the plain form: exact where arithmetic is, at the borders of codes too."""

from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from diffquant.attention import LogitMeter, attend
from diffquant.attention.backends import blocks as in_blocks
from diffquant.attention.naive import naive
from diffquant.errors import UsageError
from diffquant.family.call import AttentionCall
from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm
from diffquant.kernels import arguments, configs
from diffquant.kernels.arguments import empty_output
from diffquant.kernels.attention import prefill_simulated as module
from diffquant.kernels.attention.prefill_simulated import TILES
from diffquant.kernels.attention.round_operands import BLOCK_FORMATS, round_to_float
from diffquant.recipe.numbers.formats import format_named
from diffquant.recipe.scheme import FULL, Scheme
from tests.support.kernel_inputs import (
    expected,
    fill_unseen,
    normed,
    on_call,
    padding,
    random_call,
    relative_error,
    whole_numbers,
    with_odd_strides,
)
from tests.support.tables import in_one_test
from tests.support.thorough import sampled

simulated, blocked = on_call(module.prefill_simulated), on_call(in_blocks.attend_by_blocks)
LIMIT = 2e-3
SMALL = {key: {"queries": 64, "keys": 32} for key in TILES}

SEEN = {
    "causal": (70, 100, Mask()),
    "more queries than keys": (64, 17, Mask()),
    "one query": (1, 100, Mask()),
    "ragged": (64, 100, padding(100, starts=[7, 0], ends=[100, 57])),
    "ragged, one empty": (17, 64, padding(64, starts=[3, 20], ends=[50, 20])),
}

GRANULARITIES = ["tensor", "head", "pair", "row", "head:shift", "pair:shift", "row:shift"]


@pytest.fixture(params=["sm_80", "sm_90"])
def device_class(request, has_capability):
    """Both code paths."""
    has_capability(int(request.param[3]), 0)
    return request.param


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    monkeypatch.setattr(arguments, "empty_output", lambda q, width: empty_output(q, width).fill_(torch.nan))


def plain(q, k, v, lam, scale, mask, scheme):
    return naive(AttentionCall(q, k, v, lam, scale=scale, mask=mask, logits=scheme)).double()


@pytest.mark.parametrize("name", sampled(SEEN, 2))
@pytest.mark.parametrize(("generation", "text"), [("v1", "4:row"), ("v2", "6:tensor:shift")])
def test_equals_the_plain_form_at_every_border(device_class, generation, text, name):
    queries, keys, mask = SEEN[name]
    inputs = whole_numbers(generation, queries, keys, batch=2 if mask.keys is not None else 1)
    with configs.override_configs(SMALL):
        out = simulated(*inputs, scale=0.0625, mask=mask, scheme=Scheme.parse(text))
    assert relative_error(out, plain(*inputs, 0.0625, mask, Scheme.parse(text))) <= LIMIT


@pytest.mark.parametrize(("granularity", "bits"), sampled(product(GRANULARITIES, [2, 3, 5, 8]), 3))
def test_every_scheme_rounds_as_the_plain_form(granularity, bits):
    inputs = whole_numbers("plain" if granularity == "head" else "v1", 17, 40)
    scheme, meters = Scheme.parse(f"{bits}:{granularity}"), (LogitMeter(), LogitMeter())
    out = simulated(*inputs, scale=0.125, scheme=scheme, meter=meters[0])
    assert relative_error(out, plain(*inputs, 0.125, Mask(), scheme)) <= LIMIT
    blocked(*inputs, scale=0.125, scheme=scheme, meter=meters[1])
    assert meters[0].report() == meters[1].report()


def test_logits_between_codes_go_where_float32_division_puts_them():
    # Multiples of the step's half, as float32 rounds them: a reciprocal instead of a division misses many.
    q = torch.zeros(1, 1, 1, 64, dtype=torch.float16)
    q[..., 0] = 1
    k = torch.zeros(1, 1, 128, 64, dtype=torch.float16)
    k[0, 0, :, 0] = torch.arange(-63.5, 64, 1) * 0.7
    v = torch.randn(1, 1, 128, 64, generator=torch.Generator().manual_seed(0)).half()
    for bits in range(2, 9):
        call = [q], [k], v, None
        out = simulated(*call, scale=0.3, scheme=Scheme.parse(f"{bits}:row"))
        assert relative_error(out, plain(*call, 0.3, Mask(), Scheme.parse(f"{bits}:row"))) <= LIMIT


def test_the_kernels_quotient_is_ieee_division():
    """The kernel's three operations, each rounded once as a GPU rounds it, against numpy's division."""
    generator = np.random.default_rng(0)
    steps = np.exp2(generator.uniform(-20, 20, 400)).astype(np.float32)
    near_borders = (generator.integers(-255, 256, 400) / 2 * steps.astype(np.float64)).astype(np.float32)
    beside = np.nextafter(near_borders, generator.choice([-1e30, 0, 1e30], 400).astype(np.float32))
    for x, step in zip((*near_borders, *beside), (*steps, *steps), strict=True):
        inverse = np.float32(1) / step
        guess = x * inverse
        rest = rounded(Fraction(float(x)) - Fraction(float(guess)) * Fraction(float(step)))
        assert rounded(Fraction(float(rest)) * Fraction(float(inverse)) + Fraction(float(guess))) == x / step


def rounded(exact):
    """A fraction to float32, half to even; by way of float64 would round twice."""
    if not exact:
        return np.float32(0)
    near = np.float32(float(exact))
    choices = [near, np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))]
    return min(choices, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.int32)) & 1))


@pytest.mark.parametrize(("generation", "width"), [("plain", 64), ("v1", 128), ("v2", 128)])
def test_shipped_tiles_serve_every_width(device_class, generation, width):
    inputs = random_call(generation, 65, 130, width=width, pairs=2)
    scheme = Scheme.parse("8:head")
    out = simulated(*inputs, scale=width**-0.5, scheme=scheme)
    # Sums in another order may cross a border between codes.
    assert relative_error(out, plain(*inputs, width**-0.5, Mask(), scheme)) <= 5 * LIMIT


@pytest.mark.parametrize("granularity", ["tensor", "row:shift"])
def test_what_padding_holds_does_not_matter(device_class, granularity):
    q, k, v, lam = whole_numbers("v1", 64, 64)
    mask, scheme = padding(64, starts=[9], ends=[50]), Scheme.parse(f"4:{granularity}")
    wanted = plain(q, k, v, lam, 0.125, mask, scheme)
    fill_unseen(q, k, v, 9, 50)
    assert relative_error(simulated(q, k, v, lam, scale=0.125, mask=mask, scheme=scheme), wanted) <= LIMIT


def test_the_meter_counts_what_is_seen_and_clipped():
    inputs = whole_numbers("v1", 64, 100, batch=2)
    mask, scheme = SEEN["ragged"][2], Scheme.parse("4:head:shift")
    ours, theirs = LogitMeter(), LogitMeter()
    for _ in range(2):
        simulated(*inputs, scale=1.0, mask=mask, scheme=scheme, meter=ours)
        blocked(*inputs, scale=1.0, mask=mask, scheme=scheme, meter=theirs)
    assert ours.report() == theirs.report()
    assert ours.report()["clipped"] > 0


def test_the_pair_norm_is_part_of_the_kernel_and_pairs_find_their_keys():
    inputs = whole_numbers("v1", 17, 33, pairs=4, kv_pairs=2)
    post = PairNorm(1e-5, torch.linspace(0.5, 2, 128).half(), 0.64)
    out = simulated(*inputs, scale=0.125, scheme=Scheme.parse("8:row"), post=post)
    wanted = expected(*inputs, scale=0.125)
    assert relative_error(out, normed(wanted, post)) <= 5e-2
    unquantized = plain(*inputs, 0.125, Mask(), Scheme.parse("8:row"))
    assert relative_error(out, normed(unquantized, post)) <= LIMIT


def test_any_strides_serve(device_class):
    q, k, v, lam = whole_numbers("v1", 33, 33)
    wanted = plain(q, k, v, lam, 0.125, Mask(), Scheme.parse("4:row"))
    out = simulated(*with_odd_strides(q, k, v), lam, scale=0.125, scheme=Scheme.parse("4:row"))
    assert relative_error(out, wanted) <= LIMIT


def test_logits_of_any_size_stay_finite():
    q, k, v, lam = whole_numbers("v1", 17, 17)
    for factor in (0, 1e3):
        for text in ("4:tensor", "4:row:shift"):
            out = simulated(q, k, v, lam, scale=factor, scheme=Scheme.parse(text))
            assert relative_error(out, plain(q, k, v, lam, factor, Mask(), Scheme.parse(text))) <= LIMIT


P_TEXTS = ["8:row", "4:row:fullsum", "e4m3:row", "e4m3:row:pow2:fullsum"]
P_CALLS = [("plain", "ragged"), ("v1", "causal"), ("v2", "ragged, one empty")]
P_CASES = [(text, *call, logits) for text, call, logits in product(P_TEXTS, P_CALLS, ["16", "4:row", "6:tensor:shift"])]


# Each scheme of the weights meets each call and each scheme of the logits.
@pytest.mark.parametrize(("text", "generation", "name", "logits"), sampled(P_CASES, 2))
def test_softmax_weights_are_rounded_as_the_plain_form_rounds_them(device_class, text, generation, name, logits):
    queries, keys, mask = SEEN[name]
    q, k, v, lam = whole_numbers(generation, queries, keys, batch=2)
    schemes = {"logits": Scheme.parse(logits), "p": Scheme.parse(text)}
    call = AttentionCall(q, k, v, lam, scale=0.0625, mask=mask, meter=(meter := LogitMeter()), **schemes)
    out = module.prefill_simulated(call)
    assert (meter.calls, meter.p_calls, meter.entries > 0) == (int(logits != "16"), 1, logits != "16")
    assert relative_error(out, naive(replace(call, meter=None)).double()) <= LIMIT
    # An integer of 4 bits moves the output far more than the kernel errs.
    if text == "4:row:fullsum":
        assert relative_error(out, naive(replace(call, meter=None, p=FULL)).double()) > 10 * LIMIT


@pytest.mark.parametrize("text", sampled([*BLOCK_FORMATS, "mxfp4:fullsum", "nvfp4:fullsum"], 4))
@pytest.mark.parametrize("logits", ["16", "4:row"])
@pytest.mark.parametrize(
    ("generation", "name"), [("plain", "causal"), ("v1", "more queries than keys"), ("v2", "causal")]
)
def test_weights_in_blocks_are_rounded_as_the_plain_form_rounds_them(device_class, generation, name, logits, text):
    queries, keys, mask = SEEN[name]
    inputs = whole_numbers(generation, queries, keys, batch=2)
    schemes = {"logits": Scheme.parse(logits), "p": Scheme.parse(text)}
    call = AttentionCall(*inputs, scale=0.0625, mask=mask, **schemes)
    out = module.prefill_simulated(call)
    assert relative_error(out, naive(call).double()) <= LIMIT
    if "fp4" in text:
        assert relative_error(out, naive(replace(call, p=FULL)).double()) > 10 * LIMIT


@in_one_test("name", BLOCK_FORMATS)
def test_what_the_kernels_know_of_a_format_is_what_it_is(name):
    number_format = format_named(name)
    size, mantissa, lowest, largest, _ = BLOCK_FORMATS[name]
    normal = [level for level in number_format.levels if level >= 2.0**lowest]
    assert (number_format.block, number_format.largest) == (size, largest)
    assert normal[1] - normal[0] == 2.0 ** (lowest - mantissa) == min(x for x in number_format.levels if x > 0)


def test_every_e4m3_number_and_what_lies_between_is_rounded_as_a_cast_rounds_it():
    steps = torch.arange(0, 448 * 2**12 + 1, dtype=torch.float64) / 2**12
    borders = torch.tensor(Scheme.parse("e4m3:row").format.levels).double()
    x = torch.cat([steps[:: 2**5], steps[: 2**12], (borders[1:] + borders[:-1]) / 2, borders]).float()
    x = x[x >= 0]
    x = torch.cat([x, x.nextafter(torch.tensor(0.0)), x.nextafter(torch.tensor(448.0))])
    out = torch.empty_like(x)
    _round[(1,)](x, out, len(x), BLOCK=triton.next_power_of_2(len(x)))
    torch.testing.assert_close(out, x.to(torch.float8_e4m3fn).float(), rtol=0, atol=0)


@triton.jit
def _round(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, round_to_float(tl.load(x + at, mask=at < n, other=0.0), 3, -6), mask=at < n)


@in_one_test(
    ("text", "message"),
    [
        ("nvfp4_4over6", "softmax weights at nvfp4_4over6: one scale per group is not supported; the kernel supports"),
        ("e5m2:row", "softmax weights at e5m2:row: e5m2 is not an integer"),
        ("4:g32", "softmax weights at 4:g32: one scale per group is not supported; the kernel supports row"),
    ],
)
def test_weights_that_are_not_served_are_refused_and_go_to_blocks(text, message):
    call = AttentionCall(*random_call("v1", 5, 5), scale=0.125, mask=Mask(), p=Scheme.parse(text))
    with pytest.raises(UsageError, match=message):
        module.prefill_simulated(call)
    torch.testing.assert_close(attend(call), naive(call), rtol=0, atol=1e-3)


def test_blocks_of_sequences_that_begin_later_go_to_pytorch():
    inputs, mask = random_call("v1", 5, 5, batch=2), padding(5, starts=[0, 2], ends=[5, 5])
    call = AttentionCall(*inputs, scale=0.125, mask=mask, p=Scheme.parse("mxfp4"))
    with pytest.raises(UsageError, match="softmax weights at mxfp4: the kernel does not support padding"):
        module.prefill_simulated(call)


@in_one_test(
    ("scheme", "message"),
    [
        (Scheme.parse("4:b8"), "one scale per block is not supported; the kernel supports tensor, head, pair, row"),
        (Scheme.parse("4:map"), "one scale per map is not supported"),
        (FULL, "the call quantizes nothing"),
        (Scheme.parse("4:row:alike"), "logits with alike are not supported"),
    ],
)
def test_schemes_that_are_not_served_are_refused(scheme, message):
    q, k, v, lam = random_call("v1", 5, 5)
    with pytest.raises(UsageError, match=message):
        simulated(q, k, v, lam, scale=0.125, scheme=scheme)
