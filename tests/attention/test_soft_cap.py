"""A soft cap on logits: the formula in NumPy and float64, and what refuses it."""

import numpy as np
import pytest
import torch

from diffquant.attention import BACKENDS, attend
from diffquant.attention.dispatch import backend_for
from diffquant.errors import CheckpointError, UsageError
from diffquant.family.call import AttentionCall
from diffquant.family.mask import Mask
from diffquant.kernels.arguments import call_refusal
from diffquant.model.adapters import adapter_for
from diffquant.scheme import Scheme
from tests.support.checkpoints import NATIVE

CAP, SCALE = 2.0, 0.4


def random_call(dtype=torch.float64, **options):
    generator = torch.Generator().manual_seed(0)
    q1, q2, k, v = (
        torch.randn(2, heads, length, 8, generator=generator, dtype=torch.float64).mul(2).to(dtype)
        for heads, length in ((6, 5), (2, 5), (2, 9), (2, 9))
    )
    lam = torch.rand(2, 6, 5, 1, generator=generator, dtype=torch.float64)
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[1, :3] = False
    return AttentionCall((q1, q2), (k, k), v, lam, scale=SCALE, mask=Mask(valid, window=4), soft_cap=CAP, **options)


def one_at_a_time(call):
    """Each signal head less λ times the noise head of its three, a query at a time."""
    q1, q2, k, v, lam = (x.double().numpy() for x in (*call.q, call.k[0], call.v, call.lam))
    out = np.zeros(q1.shape)
    for b, h, t in np.ndindex(out.shape[:3]):
        places = np.flatnonzero(call.mask.keys[b].numpy()[: t + 5])[-4:]
        maps = []
        for queries, head in ((q1, h), (q2, h // 3)):
            logits = CAP * np.tanh(k[b, h // 3, places] @ queries[b, head, t] * SCALE / CAP)
            maps.append(np.exp(logits) / np.exp(logits).sum())
        out[b, h, t] = (maps[0] - lam[b, h, t, 0] * maps[1]) @ v[b, h // 3, places]
    return torch.from_numpy(out)


@pytest.mark.parametrize("backend", ["naive", "blocks", "auto"])
def test_logits_stay_below_the_cap_before_they_are_masked(backend):
    call = random_call()
    torch.testing.assert_close(attend(call, backend), one_at_a_time(call), rtol=0, atol=1e-12)


def test_capped_logits_are_what_is_rounded():
    call = random_call(logits=Scheme.parse("8:tensor"))
    torch.testing.assert_close(attend(call, "simulated"), attend(call, "naive"), rtol=0, atol=1e-12)
    # A step of 8 bits under the cap is 2/127: nothing is further away than that.
    assert 0 < (attend(call) - one_at_a_time(call)).abs().max() < 0.1


@torch.enable_grad()
def test_gradients_go_through_the_plain_form_alone():
    call = random_call()
    call.q[0].requires_grad_()
    (gradient,) = torch.autograd.grad(attend(call, "naive").sum(), call.q[0])
    assert gradient.isfinite().all()
    with pytest.raises(UsageError, match="blocks: it has no backward pass; use naive"):
        attend(call)


@pytest.mark.parametrize("backend", ["flashdiff1", "flashdiff2", "flash_attn"])
def test_a_backend_without_soft_caps_refuses_them_by_name(backend):
    with pytest.raises(UsageError, match="soft cap"):
        attend(random_call(torch.float32), backend)
    assert "soft cap" in (BACKENDS[backend].refuses(random_call(torch.float32)) or "")


def test_kernels_refuse_it_and_blocks_of_queries_serve_it():
    assert "soft cap of 2" in call_refusal(random_call())
    assert backend_for(random_call()).name == "blocks"


@pytest.mark.parametrize("cap", [0.0, -1.0, float("nan")])
def test_a_cap_is_a_magnitude(cap):
    call = random_call()
    with pytest.raises(UsageError, match="a soft cap is a magnitude above 0"):
        AttentionCall(call.q, call.k, call.v, call.lam, scale=1.0, mask=call.mask, soft_cap=cap)


def test_a_checkpoint_of_our_own_cannot_ask_for_one():
    config = NATIVE["gated"]
    with pytest.raises(CheckpointError, match=r"soft_cap of 30\.0, which only Dragon's layers have"):
        adapter_for(config | {"spec": config["spec"] | {"soft_cap": 30.0}})
