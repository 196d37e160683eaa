"""The fast training step: its loss and gradients beside float64, what it refuses, and that it resumes."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy, rms_norm

from diffquant import data
from diffquant.errors import DiffQuantError, MissingDependencyError, UsageError
from diffquant.model.modeling import DiffTransformer
from research.studies.logit_noise import observed
from research.train import kernels
from research.train import train as program
from research.train.equalized import equalize
from research.train.fast import FastLoss, _AddNorm
from research.train.kernels import is_supported
from research.train.loop import Trainer
from research.train.models import CONTROLS, GATED, KINDS, NO_NORM, matched, place
from research.train.prose import Prose
from research.train.settings import Schedule, Settings, Sizes

SMALL = Sizes(hidden=128, layers=2, heads=4, head_dim=32, inner=344, context=512, init=0.06, bias=False, theta=1e4)
LARGE = replace(SMALL, hidden=256, heads=8, inner=688)
ALL_KINDS = (*KINDS, *CONTROLS, GATED, NO_NORM)
needs_bf16 = pytest.mark.skipif(not is_supported(), reason="this processor has neither AVX-512 BF16 nor AVX2")


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
    (3.0 * loss).backward()
    return loss.item(), torch.cat([p.grad.double().flatten() for p in model.parameters()])


def exact(model, ids, weights):
    """Loss and gradients in float64, by the plain form of attention."""
    model = copy.deepcopy(model).double()
    for attention in model.attention_modules:
        attention.backend = "naive"
    logits = model(ids[:, :-1], use_cache=False).logits.flatten(0, 1)
    losses = cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
    return with_gradients(model, (losses * weights.flatten().double()).sum())


def beside_float64(model, length, lam_limit=0.25):
    """Check loss and gradients against float64: parameter for parameter, no farther from it than plain bfloat16 is.

    All λ vectors of a layer get one number's gradient, a sum that cancels: its error is one draw, and has a limit.
    """
    ids = torch.randint(0, 320, (2, length + 1))
    weights = torch.rand(2, length) / length
    true_loss, true = exact(model, ids, weights)
    loss, ours = with_gradients(model, FastLoss(model)(ids, weights))
    narrow = place(copy.deepcopy(model), "cpu", torch.bfloat16)
    logits = narrow(ids[:, :-1], use_cache=False).logits.float().flatten(0, 1)
    losses = cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
    _, plain = with_gradients(narrow, (losses * weights.flatten()).sum())
    assert abs(loss / true_loss - 1) < 2e-3
    assert error(ours, true) < error(plain, true)
    names, sizes = zip(*((name, p.numel()) for name, p in model.named_parameters()), strict=True)
    for name, *gradients in zip(names, ours.split(sizes), plain.split(sizes), true.split(sizes), strict=True):
        limit = lam_limit if "lambda_" in name and model.config.diff_spec.lam == "exp" else 0.0
        assert error(gradients[0], gradients[2]) < max(limit, 1.5 * error(gradients[1], gradients[2]) + 2e-3), name


def error(x, true):
    return float((x - true).norm() / true.norm())


@needs_bf16
@pytest.mark.parametrize("length", [64, 91])
@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_loss_and_gradients_are_closer_to_float64_than_plain_bf16(kind, sizes, length):
    beside_float64(model_of(kind, sizes), length)


@needs_bf16
@pytest.mark.parametrize("kind", KINDS)
def test_sharp_equalized_logits_are_no_worse_and_stay_within_their_limit(kind):
    model = model_of(kind, SMALL)
    equalize(model, 28.0)
    beside_float64(model, 91, lam_limit=1.0)
    largest = []
    with observed(model, lambda seen: largest.extend(float(logits.detach().abs().max()) for logits in seen.logits)):
        model(torch.randint(0, 320, (2, 91)), use_cache=False)
    assert 10 < max(largest) <= 28.001


# Losses of what E1 trains, on steps of a quarter of its tokens.
FROZEN = {
    "transformer": "6.4869 6.4748 6.4401 6.3965 6.3525 6.3105 6.2917 6.215 6.1378 6.0883 "
    "6.0341 5.9723 5.8946 5.8693 5.7847 5.7653 5.7204 5.7249 5.6919 5.6246",
    "diff-v1": "6.4982 6.4491 6.4643 6.4019 6.4201 6.3278 6.3102 6.1695 6.133 6.0726 "
    "6.024 5.9467 5.904 5.8635 5.7962 5.7888 5.7196 5.7232 5.6818 5.6194",
    "diff-v2": "6.4478 6.474 6.4282 6.4285 6.4215 6.3962 6.315 6.329 6.2666 6.2562 "
    "6.1883 6.1168 5.9855 5.9611 5.8937 5.8316 5.7755 5.7564 5.7423 5.6582",
}
SCHEDULE = Schedule(1800, 100, 1024, ((0.0, 128), (0.5, 256)), rate=4e-3, seed=100)


@pytest.fixture(scope="module")
def prose():
    return Prose(data.books_text()[:120_000], 512, vocabulary=512, sample=120_000)


def trainer_of(kind, arithmetic, schedule=SCHEDULE):
    settings = Settings("prose", replace(SMALL, layers=5), schedule, {})
    model = program.new_model(settings, kind, 512, "cpu")
    return Trainer(model, schedule, False, program.objective_of(model, arithmetic))


@pytest.mark.parametrize("arithmetic", [pytest.param("bf16", marks=needs_bf16), "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_20_losses_of_the_trainer_are_what_they_were(kind, arithmetic, prose):
    """A change of the trainer, of its data or of its start makes trainings that are no repetitions of those before."""
    trainer = trainer_of(kind, arithmetic)
    losses = [trainer._advance(prose)[0] for _ in range(20)]
    # Another processor, or the other arithmetic, moves them by less than a thousandth; another seed by much more.
    assert losses == pytest.approx([float(loss) for loss in FROZEN[kind].split()], abs=1.5e-3)


@needs_bf16
@pytest.mark.parametrize("kind", KINDS)
def test_a_fast_run_interrupted_and_resumed_ends_bit_identical(kind, prose, tmp_path):
    schedule = replace(SCHEDULE, steps=6, tokens=512)
    straight, begun, resumed = (trainer_of(kind, "bf16", schedule) for _ in range(3))
    for name in ("straight", "parts"):
        (tmp_path / name).mkdir()
    straight.train(prose, tmp_path / "straight")
    begun.train(prose, tmp_path / "parts", until=3)
    assert resumed.resume(tmp_path / "parts")
    resumed.train(prose, tmp_path / "parts")
    for (name, a), b in zip(straight.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b), name


@needs_bf16
def test_the_norm_keeps_its_epsilon_where_inputs_are_small():
    x, weight = 1e-3 * torch.randn(5, 64), torch.rand(64)
    _, out = _AddNorm.apply(x, None, weight, 1e-5)
    torch.testing.assert_close(out.float(), rms_norm(x, (64,), weight, 1e-5), rtol=2**-8, atol=0)


@needs_bf16
@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"bias": True}, "attention with biases"),
        ({"hidden": 72}, "a hidden size of 72"),
        ({"head_dim": 24}, "heads 24 and 24 wide"),
    ],
)
def test_a_model_that_the_kernels_do_not_compute_is_refused(changed, named):
    with pytest.raises(UsageError, match=f"{named}.*float32 instead"):
        FastLoss(model_of("transformer", replace(SMALL, **changed)))


@needs_bf16
@pytest.mark.parametrize(
    ("compiler", "raised", "said"),
    [("", MissingDependencyError, r"install g\+\+"), ("false", DiffQuantError, "false did not compile .*kernels.cc")],
)
def test_a_compiler_that_is_missing_or_fails_is_named(compiler, raised, said, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("PATH", str(tmp_path) if not compiler else "/bin:/usr/bin")
    monkeypatch.setattr(kernels, "BUILD", tmp_path / "build")
    with pytest.raises(raised, match=said):
        kernels.library.__wrapped__()
    assert not list(tmp_path.rglob("*.so*"))


def test_a_processor_without_the_instructions_is_told_to_train_in_float32(monkeypatch):
    monkeypatch.setattr(kernels, "is_supported", lambda: False)
    with pytest.raises(UsageError, match="AVX-512 BF16 or AVX2; train in float32 instead"):
        kernels.library.__wrapped__()


def test_an_unknown_arithmetic_is_refused():
    with pytest.raises(UsageError, match="known are float32, bf16"):
        program.objective_of(None, "fp8")
