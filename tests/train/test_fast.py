"""The fast training step: its loss and gradients beside float64, what it refuses, and that it resumes."""

import copy
from dataclasses import replace

import pytest
import torch
from equalized import equalize
from fast import FastLoss
from kernels import is_supported
from models import CONTROLS, GATED, KINDS, matched
from settings import Sizes
from torch.nn.functional import cross_entropy

from diffquant.model.modeling import DiffTransformer
from studies.logit_noise import observed

SMALL = Sizes(hidden=128, layers=2, heads=4, head_dim=32, inner=344, context=512, init=0.06, bias=False, theta=1e4)
LARGE = replace(SMALL, hidden=256, heads=8, inner=688)
ALL_KINDS = (*KINDS, *CONTROLS, GATED)
needs_bf16 = pytest.mark.skipif(not is_supported(), reason="needs a processor with AVX-512 BF16")


@pytest.fixture(autouse=True)
def _gradients():
    with torch.enable_grad():
        yield


def model_of(kind, sizes, vocabulary=320):
    torch.manual_seed(3)
    model = DiffTransformer(matched(kind, sizes, vocabulary))
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and λ away from where they start.
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def with_gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return loss.item(), torch.cat([p.grad.double().flatten() for p in model.parameters()])


def exact(model, ids, weights):
    """Loss and gradients in float64, by the plain form of attention."""
    model = copy.deepcopy(model).double()
    for attention in model.attentions:
        attention.backend = "naive"
    logits = model(ids[:, :-1], use_cache=False).logits.flatten(0, 1)
    losses = cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
    return with_gradients(model, (losses * weights.flatten().double()).sum())


@needs_bf16
@pytest.mark.parametrize("length", [64, 91])
@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_loss_and_gradients_are_those_of_float64_within_bf16(kind, sizes, length):
    model = model_of(kind, sizes)
    ids = torch.randint(0, 320, (2, length + 1))
    weights = torch.rand(2, length) / length
    loss, gradients = with_gradients(model, FastLoss(model)(ids, weights))
    true_loss, true_gradients = exact(model, ids, weights)
    assert abs(loss / true_loss - 1) < 2e-3
    assert (gradients - true_gradients).norm() < 0.05 * true_gradients.norm()


@needs_bf16
@pytest.mark.parametrize("kind", KINDS)
def test_equalized_logits_train_alike_and_stay_within_their_limit(kind):
    model = model_of(kind, SMALL)
    equalize(model, 28.0)
    ids = torch.randint(0, 320, (2, 92))
    weights = torch.rand(2, 91) / 91
    loss, gradients = with_gradients(model, FastLoss(model)(ids, weights))
    true_loss, true_gradients = exact(model, ids, weights)
    assert abs(loss / true_loss - 1) < 2e-3
    assert (gradients - true_gradients).norm() < 0.1 * true_gradients.norm()
    largest = []
    with observed(model, lambda seen: largest.extend(float(logits.detach().abs().max()) for logits in seen.logits)):
        model(ids, use_cache=False)
    assert 10 < max(largest) <= 28.001
