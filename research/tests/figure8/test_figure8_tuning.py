"""Fine-tuning with rounded logits: its gradient beside autograd on the formula, and runs from a model that ships."""

import json
import math

import pytest
import torch
from torch.nn.functional import cross_entropy, rms_norm

from diffquant.errors import UsageError
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import FULL, Scheme
from research.figure8 import plan, run, scoring, text, tuning
from research.figure8.plan import KINDS, Run, listed, results
from research.figure8.tuning import RoundedLoss

ROWS, LENGTH = 3, 23


@pytest.fixture(autouse=True)
def _with_gradients():
    with torch.enable_grad():
        yield


def small(kind):
    return run.new_model(Run("x", kind, "1.25M", 4, "4e-3", 7, "float32"), 320)


def batch():
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 320, (ROWS, LENGTH + 1), generator=generator)
    return ids, torch.full((ROWS, LENGTH), 1 / (ROWS * LENGTH))


def error_at_four_bits(logits, visible, largest):
    """Absmax at 4 bits less the logits, as a constant of autograd; hidden logits count as zero."""
    seen, scale = logits.detach().masked_fill(~visible, 0.0), largest / 7
    return (seen / scale).round() * scale - logits.detach()


def formula(model, ids, granularity):
    """Loss of a model with its attention written out; `granularity` is None where nothing is rounded."""
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()

    def attend(module, arguments, _):
        x, rotary, _, _ = arguments
        spec = module.spec
        q, k, v = module.project(x, rotary)
        maps = []
        for number in range(spec.maps):
            queries = q[:, number * spec.pairs :][:, : spec.pairs]
            keys = k if spec.shared_k else k[:, number * spec.pairs :][:, : spec.pairs]
            maps.append(torch.einsum("bhtd,bhsd->bhts", queries, keys) / math.sqrt(spec.head_dim))
        if granularity:
            sharing = (1, 2, 3) if granularity == "tensor" else -1
            tops = [m.detach().masked_fill(~visible, 0.0).abs().amax(sharing, keepdim=True) for m in maps]
            # A tensor's scale is that of both maps of all heads.
            tops = [torch.stack(tops).amax(0)] * len(tops) if granularity == "tensor" else tops
            maps = [m + error_at_four_bits(m, visible, top) for m, top in zip(maps, tops, strict=True)]
        out = [m.masked_fill(~visible, -math.inf).softmax(-1) @ v for m in maps]
        y = out[0] if spec.maps == 1 else out[0] - module.compute_lam(x) * out[1]
        if spec.post_norm == "affine":
            y = rms_norm(y, (spec.value_dim,), module.subln.weight, spec.post_norm_eps) * module.post_factor
        return module.o_proj(y.transpose(1, 2).flatten(2))

    handles = [module.register_forward_hook(attend) for module in model.attention_modules]
    logits = model(ids[:, :-1], use_cache=False).logits
    for handle in handles:
        handle.remove()
    return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("granularity", ["tensor", "row", None])
def test_gradients_are_autograds_of_the_formula_with_a_constant_error(kind, granularity):
    model = small(kind)
    # Logits of about 10, so that rounding to 4 bits moves what comes out.
    for module in model.attention_modules:
        module.q_proj.weight.data *= 6
    ids, weights = batch()
    scheme = Scheme.parse(f"4:{granularity}") if granularity else FULL
    ours, theirs = RoundedLoss(model, scheme)(ids, weights), formula(model, ids, granularity)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    expected = gradients(model, theirs)
    for name, gradient in gradients(model, ours).items():
        assert (gradient - expected[name]).norm() <= 1e-4 * expected[name].norm(), name


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_the_product_under_the_recipe(kind):
    model = small(kind)
    ids, weights = batch()
    loss = RoundedLoss(model, Scheme.parse("4:tensor"))(ids, weights)
    model.apply_recipe(Recipe.of(logits="4:tensor"))
    with torch.inference_mode():
        logits = model(ids[:, :-1], use_cache=False).logits
    assert loss.item() == pytest.approx(cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item(), rel=1e-5)


@pytest.fixture
def _a_thousandth(monkeypatch, tmp_path):
    """Fine-tunings of three steps of 512 tokens, scored on short passages."""
    monkeypatch.setattr(text, "HELD_OUT", 16)
    monkeypatch.setattr(tuning, "HELD_OUT", 4)
    monkeypatch.setattr(tuning, "SCHEMES", ["4:tensor", "4:row"])
    monkeypatch.setattr(scoring, "STEPS", (2.0,))
    monkeypatch.setattr(scoring, "BOOKS", scoring.Settings(passages=3, windows=2, window=32))
    monkeypatch.setattr(plan, "TOKENS_PER_STEP", 512)
    monkeypatch.setattr(run, "BUILD", tmp_path / "build")


@pytest.mark.usefixtures("_a_thousandth")
@pytest.mark.parametrize("arm", plan.TUNED)
def test_a_fine_tuning_starts_from_the_model_that_ships_and_writes_what_the_analysis_reads(arm, books, tmp_path):
    planned = Run(f"e7-diff-v1{arm}-seed-101", f"diff-v1{arm}", "1.25M", 3, "0.4e-3", 101, "float32")
    run.train_and_score(planned, books, tmp_path / "raw", math.inf)
    found = results(tmp_path / "raw")[planned.name]
    assert found["base"]["run"] == "diffquant/data/pocket/prose-diff-v1"
    assert found["tuned_at"] == plan.TUNED[arm]
    assert found["weights"] != found["base"]["weights"]
    assert found["losses"].keys() == {"1", "2", "3"}
    assert found["books"]["nll"].keys() == {"16", "4:tensor", "4:row"}
    assert len(found["books"]["kl"]["4:tensor"]) == 3
    assert found["held_out"]["4:row"]["nll"] > 0
    assert found["books"]["layers"][0]["sensitivity"].keys() == {"first", "second", "both"}


def test_a_base_whose_weights_are_not_those_of_its_raw_file_is_refused(tmp_path):
    (planned,) = (each for each in listed() if each.name == "e7-diff-v2-tuned-row-seed-113")
    with pytest.raises(UsageError, match="starts from the model of e6-diff-v2-seed-113"):
        tuning.load_base(planned, tmp_path, {})
    small("diff-v2").save_pretrained(tmp_path / planned.base_run / "model")
    with pytest.raises(UsageError, match="has other weights than the raw file of e6-diff-v2-seed-113"):
        tuning.load_base(planned, tmp_path, {planned.base_run: {"weights": "f00d"}})


def test_a_fine_tuning_can_begin_once_its_base_is_there(tmp_path):
    (planned,) = (each for each in listed() if each.name == "e7-diff-v2-tuned-row-seed-113")
    assert plan.rate_of(planned, {}) is None
    assert plan.rate_of(planned, {"e6-diff-v2-seed-113": json.loads("{}")}) == 4e-4
