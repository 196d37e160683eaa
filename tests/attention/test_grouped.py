"""Groups of signal heads that share a noise head: against a formula of one query at a time, and against plain pairs."""

import logging

import pytest
import torch

from diffquant.attention import BACKENDS, LogitMeter, attend
from diffquant.attention.backends import triton
from diffquant.family.call import AttentionCall
from diffquant.family.mask import Mask
from diffquant.kernels.arguments import call_refusal
from diffquant.recipe.scheme import Scheme
from tests.support.tables import in_one_test

# Pairs, noise heads, KV pairs: Motif-2's kind, a ratio of 3 over one KV pair, noise heads that share KV pairs.
SHAPES = {"4:1": (8, 2, 2), "3:1-mqa": (6, 2, 1), "2:1-gqa": (12, 6, 3)}
SCHEMES = ["tensor", "head", "pair", "row", "b8", "tensor:shift", "row:shift", "tensor:alike", "head:alike"]


def random_call(shape, length=13, keys=21, shares_keys=False, **changes):
    pairs, noises, kv_pairs = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)

    def normal(heads, tokens, width=8):
        return torch.randn(2, heads, tokens, width, generator=generator, dtype=torch.float64)

    k = [normal(kv_pairs, keys) for _ in range(2)]
    given = {
        "q": [normal(pairs, length), normal(noises, length)],
        "k": [k[0], k[0]] if shares_keys else k,
        "v": normal(kv_pairs, keys, 16),
        "lam": torch.rand(2, pairs, length, 1, generator=generator, dtype=torch.float64),
        "scale": 0.3,
        "mask": Mask(),
    }
    return given | changes


def one_at_a_time(q, k, v, lam, scale, mask, signal_gate=None):
    """γ·A1·V - λ·A2·V for one query of one signal head at a time; group g's noise head is g, both read its KV pair."""
    batch, pairs, length, _ = q[0].shape
    noises, kv_pairs, keys = q[1].shape[1], v.shape[1], v.shape[2]
    out = torch.zeros(batch, pairs, length, v.shape[-1], dtype=torch.float64)
    for b in range(batch):
        for s in range(pairs):
            g = s // (pairs // noises)
            kv = g // (noises // kv_pairs)
            for t in range(length):
                seen = slice(0, keys - length + t + 1)
                a1 = (k[0][b, kv, seen] @ q[0][b, s, t] * scale).softmax(0)
                a2 = (k[1][b, kv, seen] @ q[1][b, g, t] * scale).softmax(0)
                gate = 1 if signal_gate is None else signal_gate[b, s, t]
                out[b, s, t] = (gate * a1 - lam[b, s, t] * a2) @ v[b, kv, seen]
    return out


@pytest.mark.parametrize("shares_keys", [False, True], ids=["v1", "v2"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", ["naive", "flashdiff1", "flashdiff2", "auto"])
def test_backends_equal_the_formula(backend, shape, shares_keys):
    given = random_call(shape, shares_keys=shares_keys)
    torch.testing.assert_close(attend(AttentionCall(**given), backend), one_at_a_time(**given), rtol=0, atol=1e-12)


@pytest.mark.parametrize("text", SCHEMES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", ["naive", "simulated"])
def test_rounded_logits_are_those_of_pairs_with_noise_heads_of_their_own(backend, shape, text):
    given = random_call(shape, logits=Scheme.parse(f"4:{text}"))
    pairs, noises, _ = SHAPES[shape]
    own = [given["q"][1][:, s // (pairs // noises)] for s in range(pairs)]
    expanded = given | {"q": [given["q"][0], torch.stack(own, 1)]}
    wanted = attend(AttentionCall(**expanded), "naive")
    torch.testing.assert_close(attend(AttentionCall(**given), backend), wanted, rtol=0, atol=1e-12)


@in_one_test("backend", ["naive", "simulated"])
def test_static_ranges_are_those_of_signal_heads_and_then_of_noise_heads(backend):
    pairs, noises, _ = SHAPES["4:1"]
    ranges = torch.linspace(0.5, 2.0, pairs + noises, dtype=torch.float64)
    given = random_call("4:1", logits=Scheme.parse("5:static"), ranges=ranges)
    own = torch.cat([ranges[:pairs], ranges[pairs:].repeat_interleave(4)])
    expanded = given | {"q": [given["q"][0], given["q"][1].repeat_interleave(4, 1)], "ranges": own}
    wanted = attend(AttentionCall(**expanded), "naive")
    torch.testing.assert_close(attend(AttentionCall(**given), backend), wanted, rtol=0, atol=1e-12)
    assert torch.equal(AttentionCall(**given).expand_noise().ranges, own)


@in_one_test("backend", ["naive", "simulated"])
def test_a_shared_noise_map_is_rounded_once(backend):
    meters = {}
    for text in ("row", "pair"):
        meters[text] = LogitMeter()
        given = random_call("4:1", length=21, meter=meters[text], logits=Scheme.parse(f"4:{text}"))
        attend(AttentionCall(**given), backend)
    entries = 2 * 21 * 22 // 2
    assert int(meters["row"].entries) == 10 * entries
    # A scale that both maps of a pair share differs from pair to pair.
    assert int(meters["pair"].entries) == 16 * entries


def test_kernels_refuse_shared_noise_heads_and_their_backends_repeat_them(caplog, monkeypatch):
    call = AttentionCall(**random_call("4:1"))
    assert call.signals_per_noise == 4
    seen = []
    monkeypatch.setattr(triton, "_kernel", lambda name: lambda each: seen.append(each) or each.v)
    with caplog.at_level(logging.INFO):
        BACKENDS["triton"].compute(call)
    assert torch.equal(seen[0].q[1], call.q[1].repeat_interleave(4, 1))
    assert "every noise head is repeated 4 times" in caplog.text
    assert call_refusal(call).startswith("4 pairs share a noise head")
    assert call_refusal(call.expand_noise()) is None
