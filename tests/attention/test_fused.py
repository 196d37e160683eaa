"""The dispatcher and the Triton kernels together, interpreted as if this were a device that runs them."""

import logging
from dataclasses import replace
from itertools import product

import pytest
import torch

pytest.importorskip("triton")

from diffquant.attention import LogitMeter, attend, registry
from diffquant.attention.backends import triton
from diffquant.errors import UsageError
from diffquant.family.call import AttentionCall
from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm
from diffquant.recipe.scheme import Scheme
from tests.support.kernel_inputs import random_call, relative_error
from tests.support.thorough import sampled

POST = PairNorm(1e-5, torch.rand(128), 0.7)


@pytest.fixture(autouse=True)
def _any_device_will_do(monkeypatch):
    monkeypatch.setattr(triton, "device_refusal", lambda device: None)


def masks(keys):
    valid = torch.ones(2, keys, dtype=torch.bool)
    valid[1, : keys // 3] = False
    return [Mask(), Mask(keys=valid)]


def call_of(generation, queries, keys, mask):
    q, k, v, lam = random_call(generation, queries, keys, batch=2)
    return AttentionCall(q, k, v, lam, scale=0.125, mask=mask, post=POST if generation == "v1" else None)


def compute(call, backend, **options):
    return attend(replace(call, **options), backend)


@pytest.mark.parametrize("which", range(2), ids=["causal", "left-padded"])
@pytest.mark.parametrize("generation", ["v1", "v2"])
@pytest.mark.parametrize(("backend", "limit"), sampled([("auto", 2e-3), ("triton-int8", 2e-2)], 2))
def test_kernels_serve_what_the_plain_form_computes(backend, limit, generation, which):
    call = call_of(generation, 29, 40, masks(40)[which])
    if backend == "auto":
        assert registry.backend_for(call).name == "triton"
    assert relative_error(compute(call, backend), compute(call, "naive").double()) <= limit


@pytest.mark.parametrize(
    ("generation", "scheme"),
    sampled(product(["plain", "v1", "v2"], ["4:row", "6:tensor", "4:head:shift", "8:pair"]), 3),
)
def test_simulated_logits_are_those_of_the_plain_form_and_counted_alike(generation, scheme):
    call = call_of(generation, 29, 40, masks(40)[1])
    logits, meter, blocked = Scheme.parse(scheme), LogitMeter(), LogitMeter()
    out = compute(call, "auto", logits=logits, meter=meter)
    assert relative_error(out, compute(call, "naive", logits=logits).double()) <= 2e-3
    in_torch = compute(call, "simulated", logits=logits, meter=blocked)
    assert relative_error(out, in_torch.double()) <= 2e-3
    counted, wanted = meter.report(), blocked.report()
    assert {name: counted[name] for name in ("calls", "entries")} == {n: wanted[n] for n in ("calls", "entries")}
    assert counted["step_mean"] == pytest.approx(wanted["step_mean"], rel=1e-3)


def test_why_a_kernel_is_passed_over_is_logged(caplog):
    holes = torch.tensor([[True, False, True] * 10] * 2)
    with caplog.at_level(logging.INFO, "diffquant.attention"):
        assert registry.backend_for(call_of("v1", 30, 30, Mask(keys=holes))).name == "flashdiff2"
    assert "triton is not used: the padding mask has holes" in caplog.text
    # Fewer queries than a tile of the kernel has rows leave most of it empty.
    assert registry.backend_for(call_of("v1", 16, 30, Mask())).name == "flashdiff2"
    assert registry.backend_for(call_of("v1", 17, 30, Mask())).name == "triton"
    assert registry.backend_for(call_of("plain", 30, 30, Mask())).name == "flashdiff2"


def test_an_override_that_cannot_serve_says_why():
    with pytest.raises(UsageError, match=r"'triton': .*for one use scaled_dot_product_attention; use auto"):
        compute(call_of("plain", 30, 30, Mask()), "triton")


def test_gradients_go_through_sdpa():
    call = call_of("v2", 30, 30, Mask())
    call.v.requires_grad_()
    with torch.enable_grad():
        assert registry.backend_for(call).name == "flashdiff2"
