"""Queries and keys that the simulated kernel rounds itself, interpreted: the plain form's codes, then its maps."""

from itertools import product

import pytest
import torch

from diffquant.attention.operands import round_operands
from diffquant.errors import UsageError
from diffquant.family.call import AttentionCall
from diffquant.family.mask import Mask
from diffquant.kernels.attention.prefill_simulated import prefill_simulated
from diffquant.kernels.attention.round_operands import quantize_per_token
from diffquant.recipe.scheme import Scheme
from tests.support.kernel_inputs import expected_of_rounded, padding, random_call, relative_error, steps_of_two
from tests.support.thorough import sampled

QK, LOGITS, P = ["8:row", "e4m3:row", "mxfp4"], ["8:row", "4:head:shift", "16"], ["16", "nvfp4"]
RAGGED = padding(60, starts=[5, 0], ends=[60, 37])


@pytest.fixture(params=["sm_90", pytest.param("sm_80", marks=pytest.mark.thorough)])
def device_class(request, has_capability):
    """Both code paths."""
    has_capability(int(request.param[3]), 0)
    return request.param


@pytest.mark.parametrize("text", ["8:row", "6:row", "2:row", "e4m3:row", "mxfp4", "mxfp8", "mxfp6_up"])
@pytest.mark.parametrize("dtype", sampled([torch.float16, torch.float32], 2), ids=str)
def test_codes_and_scales_are_those_of_the_plain_form(text, dtype):
    (q,), (k,), _, _ = random_call("plain", 37, 65, pairs=2, batch=2, dtype=dtype)
    k[:, :, 3] = 0
    wanted = round_operands(q, k, Mask(), Scheme.parse(text))
    for x, of_x in zip((q, k), wanted, strict=True):
        (codes,), steps = quantize_per_token([x], Scheme.parse(text))
        assert torch.equal(codes.float() * steps[:, :, 0, :, None], of_x)


# Logits of steps that are powers of two are exact in float32, so that each falls where the plain form puts it.
@pytest.mark.parametrize(
    ("generation", "qk", "logits", "p"), sampled(product(["v1", "v2", "plain"], QK, LOGITS, P), 11)
)
def test_equals_the_plain_form_over_rounded_operands(device_class, generation, qk, logits, p):
    q, k, v, lam = steps_of_two(*random_call(generation, 40, 60, batch=2, pairs=2), Scheme.parse(qk))
    schemes = {"logits": Scheme.parse(logits), "p": Scheme.parse(p)}
    mask = Mask() if p == "nvfp4" else RAGGED
    out = prefill_simulated(AttentionCall(q, k, v, lam, scale=0.125, mask=mask, qk=Scheme.parse(qk), **schemes))
    assert relative_error(out, expected_of_rounded(q, k, v, lam, 0.125, mask, Scheme.parse(qk), **schemes)) <= 2e-3


def test_what_the_kernel_does_not_round_is_refused_by_name(has_capability):
    has_capability(9, 0)
    q, k, v, lam = random_call("v1", 3, 5)
    for text, said in (
        ("8:head", "one scale per head is not supported; the kernel supports row"),
        ("8:row:smooth", "the transform smooth is not supported"),
        ("nvfp4", "the kernel supports MX formats, integers and e4m3"),
    ):
        call = AttentionCall(q, k, v, lam, scale=1.0, mask=Mask(), qk=Scheme.parse(text))
        with pytest.raises(UsageError, match=f"queries and keys at {call.qk}: {said}"):
            prefill_simulated(call)
    call = AttentionCall(q, k, v, lam, scale=1.0, mask=Mask(), qk=Scheme.parse("8:row"))
    with pytest.raises(UsageError, match="quantizes only logits"):
        prefill_simulated(call, specialized=True)
