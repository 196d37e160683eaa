"""Warp-specialized attention on a Hopper device, against the plain form in float64."""

import pytest
import torch

from diffquant.attention.naive import naive
from diffquant.family.call import AttentionCall
from diffquant.kernels import arguments
from diffquant.kernels.arguments import empty_output
from diffquant.kernels.attention import prefill_specialized as module
from diffquant.kernels.attention.prefill_simulated import prefill_simulated
from diffquant.kernels.attention.prefill_specialized import prefill_specialized_refusal
from diffquant.recipe.scheme import Scheme
from tests.gpu import seen
from tests.support.kernel_inputs import CAUSAL, expected, on_call, padding, random_call, relative_error

DEVICE = "cuda"
prefill_specialized, simulated = on_call(module.prefill_specialized), on_call(prefill_simulated)
LIMITS = {16: 2e-3, 8: 8e-2}
CASES = [("v1", 16), ("v2", 16), ("plain", 8), ("v1", 8), ("v2", 8)]
IDS = [f"{generation}-{bits}-bit" for generation, bits in CASES]
# Every kernel is compiled anew for each, at some seconds.
WIDTHS = [(128, torch.float16), (64, torch.bfloat16)]
LONG = 65_536

if torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a CUDA device of Hopper's", allow_module_level=True)


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    monkeypatch.setattr(arguments, "empty_output", lambda q, width: empty_output(q, width).fill_(torch.nan))


# Rows that see nothing share a tile with those that see whole blocks.
SEEN = {**seen.SEEN, "right padding": (300, 300, padding(300, ends=[300, 200], device=DEVICE))}


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
