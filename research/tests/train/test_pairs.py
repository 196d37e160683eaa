"""Continued pairs: where the models start, that a run resumes, what a delta keeps, and what is refused."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import diffquant
from diffquant import data
from diffquant.errors import CheckpointError, GroupSizeError, OutputExistsError, UsageError
from diffquant.measure.scoring import next_token_kl
from diffquant.model.modeling import DiffTransformer
from diffquant.quantization.conversion import convert
from research.train import deltas, starts
from research.train import pairs as program
from research.train.distil import Continuation, Objective
from research.train.loop import CHECKPOINT, LOG
from research.train.models import KINDS, matched, place
from research.train.settings import PairsSettings, Schedule, Sizes
from research.train.three import DELTA, Limit, Trio, planned_steps
from research.train.tokens import TOKENS, TokenWindows
from tests.support import tiny_lm
from tests.support.thorough import sampled, thorough

SCHEDULE = Schedule(steps=8, warmup=2, tokens=96, lengths=((0.0, 32),), rate=1e-2, accumulate=2, decay=0.0)
SETTINGS = PairsSettings(SCHEDULE, 0.05, {"diff-v1": 0.3}, "4:g32", heldout=1500, calibration=128, every=3)
LIMIT = Limit(minutes=5)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_lm.write_llama(tmp_path_factory.mktemp("base") / "llama")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "books.txt"
    file.write_text(data.books_text()[:20000])
    return file


@pytest.fixture(scope="module")
def original(base):
    return program.load_original(base)


@pytest.fixture(scope="module")
def ids():
    return torch.tensor([tiny_lm.tokenizer().encode(data.books_text()[:900])[:200]])


@pytest.fixture(scope="module")
def run(base, text, tmp_path_factory):
    """A whole run: its folder and results."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    with torch.enable_grad():
        return folder, program.train(SETTINGS, base, text, folder, LIMIT)


def divergence(model, reference, ids):
    with torch.no_grad():
        return next_token_kl(reference(ids).logits.float(), model(ids).logits.float()).mean().item()


def test_v2_starts_as_diffquants_exact_conversion(base, original, tmp_path):
    convert(base, tmp_path / "v2", "diff-v2")
    wanted = diffquant.load(tmp_path / "v2", dtype=torch.float32).state_dict()
    found = starts.new_model("diff-v2", original, []).state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_v1_starts_as_near_as_its_constant_is_large(original, ids, monkeypatch):
    distances = []
    for constant in (1.0, 3.0, 30.0, 300.0):
        monkeypatch.setattr(starts, "_CONSTANT", constant)
        v1 = starts.new_model("diff-v1", original, starts.levels_of(original, ids))
        distances.append(divergence(v1, original, ids))
    assert distances == sorted(distances, reverse=True)
    assert distances[1] < 0.05
    assert distances[-1] < 1e-5


@pytest.mark.parametrize("kind", ["diff-v1", "diff-v2"])
def test_noise_separates_the_maps_and_costs_more_the_more_of_it(original, ids, kind):
    levels = starts.levels_of(original, ids)
    models = [starts.new_model(kind, original, levels, noise) for noise in (0.0, 0.05, 0.3)]
    gaps = []
    for model in models:
        q = model.attention_modules[0].q_proj.weight.unflatten(0, (-1, 2, 8))
        gaps.append((q[:, 0] - q[:, 1]).std() / original.attention_modules[0].q_proj.weight.std())
    assert gaps[0] == 0
    assert gaps[1] == pytest.approx(0.05, rel=0.2)
    costs = [divergence(model, original, ids) for model in models]
    assert costs[0] < costs[1] < costs[2]


def test_v1s_lambda_starts_as_a_half_and_can_move(original, ids):
    v1 = starts.new_model("diff-v1", original, starts.levels_of(original, ids))
    for attention in v1.attention_modules:
        attention.requires_grad_(True)
        lam = attention.compute_lam(torch.empty(0))
        assert lam.item() == pytest.approx(0.5, abs=1e-6)
        assert torch.autograd.grad(lam, attention.lambda_q1)[0].abs().min() > 0


def test_v1s_constant_is_hidden_from_the_output_projection_until_the_norm_shows_it(original, ids):
    """It would be a bias there that learns at the rate of all its channels together."""
    model = starts.new_model("diff-v1", original, starts.levels_of(original, ids), 0.05)
    for parameter in starts.attention_parameters(model).values():
        parameter.requires_grad_(True)
    Objective(model, original, compiled=False).differentiate(ids[:, :97], torch.full((1, 96), 1 / 96), distil=False)
    for attention in model.attention_modules:
        columns = attention.o_proj.weight.grad.unflatten(1, (-1, 2, 8))
        assert columns[:, :, 1].abs().max() == 0 < columns[:, :, 0].abs().min()
        assert attention.subln.weight.grad.abs().min() > 0


@pytest.mark.parametrize("kind", sampled(KINDS, 3))
def test_as_much_is_compiled_however_many_layers_a_model_has(kind, monkeypatch):
    operations = []
    for layers in (2, 4):
        graphs = CompileCounter()
        torch._dynamo.reset()
        sizes = Sizes(32, layers, 2, 16, 48, context=32, init=0.02, bias=False, theta=1e4)
        model, teacher = (DiffTransformer(matched(name, sizes, 50)) for name in (kind, "transformer"))
        teacher.requires_grad_(False)
        for each in (model, teacher):
            each.use_attention("flashdiff1")
        windows, weights = torch.randint(50, (2, 18)), torch.ones(2, 17)
        with monkeypatch.context() as patched:
            patched.setattr(torch, "compile", partial(torch.compile, backend=graphs))
            objective = Objective(model, teacher, compiled=True)
        losses = [objective.differentiate(windows, weights, distil) for distil in (False, True, False)]
        assert losses[0] == pytest.approx(losses[2])
        operations.append(graphs.op_count)
    assert operations[0] == operations[1] > 0


@pytest.mark.parametrize("distil", [False, True], ids=["text", "distil"])
def test_gradients_are_those_of_whole_logits(original, ids, distil, monkeypatch):
    monkeypatch.setattr("research.train.distil._TOKENS", 7)
    model = starts.new_model("diff-v2", original, [], 0.3)
    windows, weights = ids[:, :97].view(1, -1), torch.full((1, 96), 1 / 96)
    for parameter in starts.attention_parameters(model).values():
        parameter.requires_grad_(True)
    loss = Objective(model, original, compiled=False).differentiate(windows, weights, distil)
    found = {name: parameter.grad for name, parameter in starts.attention_parameters(model).items()}
    model.zero_grad()
    logits = model(windows[:, :-1]).logits[0]
    if distil:
        target = original(windows[:, :-1]).logits[0]
        whole = torch.nn.functional.kl_div(logits.log_softmax(-1), target.softmax(-1), reduction="batchmean")
    else:
        whole = torch.nn.functional.cross_entropy(logits, windows[0, 1:])
    whole.backward()
    assert loss == pytest.approx(whole.item(), rel=1e-5)
    for name, parameter in starts.attention_parameters(model).items():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-6, msg=name)
    assert model.lm_head.weight.grad is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_continuation_interrupted_and_resumed_ends_bit_identical(original, ids, text, kind, tmp_path):
    source = TokenWindows(tmp_path, text.read_text(), tiny_lm.tokenizer())
    three = Trio(original, starts.levels_of(original, ids), SETTINGS, "cpu")
    again = Trio(original, starts.levels_of(original, ids), SETTINGS, "cpu")

    def continuation(of):
        return Continuation(of.models[kind], SCHEDULE, of.objectives[kind], 0.3)

    whole = continuation(three)
    whole.train(source, tmp_path)
    (tmp_path / "parts").mkdir()
    continuation(again).train(source, tmp_path / "parts", until=1, every=1)
    resumed = continuation(again)
    assert resumed.resume(tmp_path / "parts")
    resumed.train(source, tmp_path / "parts")
    assert resumed.step == 8
    for name, weight in whole.trained.items():
        assert torch.equal(weight, resumed.trained[name]), name


def test_a_run_killed_in_the_second_model_goes_on_to_the_same_deltas_and_is_read_then(
    run, base, text, tmp_path, monkeypatch
):
    folder, results = run
    read, batches = TokenWindows.batch, []

    def killed(self, *arguments):
        batches.append(arguments)
        if len(batches) == 30:
            raise KeyboardInterrupt
        return read(self, *arguments)

    monkeypatch.setattr(TokenWindows, "batch", killed)
    with pytest.raises(KeyboardInterrupt):
        program.train(SETTINGS, base, text, tmp_path / "run", LIMIT)
    assert (tmp_path / "run" / KINDS[1] / CHECKPOINT).exists()
    assert not (tmp_path / "run" / program.RESULTS).exists()
    tokens = (tmp_path / "run" / TOKENS).stat()
    assert program.train(SETTINGS, base, text, tmp_path / "run", LIMIT) == results
    assert (tmp_path / "run" / TOKENS).stat().st_mtime_ns == tokens.st_mtime_ns
    with monkeypatch.context() as patched:
        patched.setattr(program, "Trio", None)
        assert program.train(SETTINGS, base, text, tmp_path / "run", LIMIT) == results
    for kind in KINDS:
        a, b = (deltas.read_delta(place / kind / DELTA) for place in (folder, tmp_path / "run"))
        assert all(torch.equal(a.tensors[name], b.tensors[name]) for name in a.tensors)


@thorough
@pytest.mark.timeout(1200)
def test_what_runs_on_a_gpu_runs_and_goes_on_where_it_was_stopped(base, text, tmp_path, monkeypatch):
    """In bfloat16, compiled, by the backend for GPUs: by the name of a device that is not "cpu"."""
    settings = replace(SETTINGS, schedule=replace(SCHEDULE, steps=0), every=1)
    steps = Continuation._advance
    taken = []

    def stopped(self, batches):
        taken.append(self.step)
        if len(taken) == 3:
            raise KeyboardInterrupt
        return steps(self, batches)

    monkeypatch.setattr(Trio, "seconds_a_step", lambda self, batches: dict.fromkeys(KINDS, 30.0))
    monkeypatch.setattr(Continuation, "_advance", stopped)
    with pytest.raises(KeyboardInterrupt):
        # The minutes leave time for two steps of each.
        program.train(settings, base, text, tmp_path / "run", Limit(6), "cpu:0")
    monkeypatch.setattr(Continuation, "_advance", steps)
    results = program.train(settings, base, text, tmp_path / "run", Limit(6), "cpu:0")
    for kind in KINDS:
        model = results["models"][kind]
        assert model["trained"]["perplexity"] < model["start"]["perplexity"]
        assert model["kept"]["kl_from_trained"] < 0.02
        log = [json.loads(line)["step"] for line in (tmp_path / "run" / kind / LOG).read_text().splitlines()]
        assert log == list(range(1, results["steps"] + 1))
        program.apply(tmp_path / "run" / kind / DELTA, base, tmp_path / kind)


def test_all_models_read_the_same_tokens_and_learn(run):
    folder, results = run
    assert results["steps"] == 8
    assert results["tokens"] == 8 * 2 * 96
    for kind in KINDS:
        model = results["models"][kind]
        assert model["trained"]["perplexity"] < model["start"]["perplexity"]
        assert model["kept"]["kl_from_trained"] < 0.02 < model["trained"]["kl"]
        log = [json.loads(line) for line in (folder / kind / LOG).read_text().splitlines()]
        assert [line["step"] for line in log] == [3, 6, 8]
        assert all(line["tokens_per_second"] > 0 for line in log)
    assert "diff-v1" in program.results_table(results)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("bits", "tolerance"), [("8:g32", 0.0045), ("4:g32", 0.08)])
def test_a_delta_makes_the_trained_model_within_half_a_step(original, ids, kind, bits, tolerance):
    """Half a step of the codes, of the scale's own rounding, and of the bfloat16 that the checkpoint has."""
    levels = starts.levels_of(original, ids)
    trained = starts.attention_parameters(starts.new_model(kind, original, levels, 0.05))
    draw = torch.Generator().manual_seed(1)
    trained = {name: p + 0.1 * torch.randn(p.shape, generator=draw) for name, p in trained.items()}
    delta = deltas.difference(kind, "base", diffquant.Scheme.parse(bits), {}, levels, trained, original)
    model = deltas.applied(delta, original)
    start = dict(starts.new_model(kind, original, levels).named_parameters())
    for name, weight in starts.attention_parameters(model).items():
        moved = (trained[name] - start[name]).abs().max() if name.endswith("_proj.weight") else 0.0
        rounding = 2**-8 * trained[name].abs().max()
        assert (weight.float() - trained[name]).abs().max() <= tolerance * moved + rounding, name


def test_apply_writes_a_checkpoint_that_computes_what_was_measured(run, base, tmp_path):
    folder, _ = run
    for kind in KINDS:
        program.apply(folder / kind / DELTA, base, tmp_path / kind)
        model = diffquant.load(tmp_path / kind)
        delta = deltas.read_delta(folder / kind / DELTA)
        wanted = deltas.applied(delta, program.load_original(base))
        for (name, a), b in zip(model.named_parameters(), wanted.parameters(), strict=True):
            assert torch.equal(a, b), name
        assert model.config.diff_spec == starts.spec_of(kind, program.load_original(base).config.diff_spec)
        assert diffquant.load_tokenizer(tmp_path / kind).encode("It was.") == tiny_lm.tokenizer().encode("It was.")
        diffquant.quantize(tmp_path / kind, tmp_path / f"{kind}-4bit", diffquant.Recipe.of(weights="4:g16"))
    with pytest.raises(OutputExistsError):
        program.apply(folder / kind / DELTA, base, tmp_path / kind)


def test_apply_refuses_another_base_and_what_is_no_delta(run, base, tmp_path):
    folder, _ = run
    other = tiny_lm.write_llama(tmp_path / "other", seed=1)
    with pytest.raises(CheckpointError, match="trained on another base"):
        program.apply(folder / "diff-v2" / DELTA, other, tmp_path / "out")
    (tmp_path / "broken").write_text("no")
    for file, message in ((base / "model.safetensors", "holds no delta"), (tmp_path / "broken", "cannot read a delta")):
        with pytest.raises(CheckpointError, match=message):
            program.apply(file, base, tmp_path / "out")
    delta = deltas.read_delta(folder / "diff-v2" / DELTA)
    less = {name: tensor for name, tensor in delta.tensors.items() if "layers.1.self_attn.lambda" not in name}
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.lambda_proj\.weight"):
        deltas.applied(replace(delta, tensors=less), program.load_original(base))
    assert not (tmp_path / "out").exists()


def test_a_folder_of_another_run_and_bad_inputs_are_refused_before_any_work(run, base, text, tmp_path):
    given = {"settings": SETTINGS, "base": base, "text": text, "output": tmp_path / "run", "limit": LIMIT}
    for changed, error, message in (
        ({"settings": replace(SETTINGS, perturbation=0.1), "output": run[0]}, UsageError, "another output"),
        ({"output": base}, OutputExistsError, "no training run"),
        ({"text": tmp_path / "absent.txt"}, UsageError, "cannot read text"),
        ({"settings": replace(SETTINGS, distil={"v1": 0.1})}, UsageError, "unknown kinds v1"),
        ({"settings": replace(SETTINGS, heldout=19990)}, UsageError, "fewer than a window of 32"),
        ({"settings": replace(SETTINGS, delta="16")}, UsageError, "delta 16"),
        ({"settings": replace(SETTINGS, delta="4:c8")}, UsageError, "column|c8"),
        ({"settings": replace(SETTINGS, delta="4:g48")}, GroupSizeError, r"diff-v1: .*q_proj.weight \[64, 32\]"),
        ({"base": tiny_lm.write_diff_v2(tmp_path / "v2")}, UsageError, "give a Transformer"),
        ({"device": "cuda"}, UsageError, "cuda"),
    ):
        with pytest.raises(error, match=message):
            program.train(**given | changed)
    assert not (tmp_path / "run").exists()


def test_the_minutes_decide_the_steps_once(original, ids, text, tmp_path, monkeypatch):
    settings = replace(SETTINGS, schedule=replace(SCHEDULE, steps=0))
    source = TokenWindows(tmp_path, text.read_text(), tiny_lm.tokenizer())
    three = Trio(original, starts.levels_of(original, ids), settings, "cpu")
    monkeypatch.setattr(three, "seconds_a_step", lambda source: dict.fromkeys(KINDS, 2.0))
    began = program.time.monotonic()
    with pytest.raises(UsageError, match="--minutes more"):
        planned_steps(tmp_path, three, source, Limit(0.05), began)
    # A tenth is spared, and three models take six seconds a step.
    assert planned_steps(tmp_path, three, source, Limit(1.01), began) == 9
    assert planned_steps(tmp_path, three, source, Limit(60), began) == 9
    assert planned_steps(tmp_path, three, source, Limit(60, steps=5), began) == 5


def test_steps_are_timed_without_training(original, ids, text, tmp_path):
    source = TokenWindows(tmp_path, text.read_text(), tiny_lm.tokenizer())
    three = Trio(original, starts.levels_of(original, ids), SETTINGS, "cpu")
    before = {kind: [p.clone() for p in model.parameters()] for kind, model in three.models.items()}
    assert min(three.seconds_a_step(source).values()) > 0
    for kind, model in three.models.items():
        assert all(torch.equal(a, b) for a, b in zip(before[kind], model.parameters(), strict=True))
        assert all(p.grad is None for p in model.parameters())


def test_bfloat16_leaves_rotary_frequencies_alone(original):
    model = place(starts.new_model("diff-v2", original, []), "cpu", torch.bfloat16)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_the_settings_that_ship_are_read_and_bad_ones_are_one_clear_error(tmp_path):
    shipped = PairsSettings.read(Path(program.__file__).with_name("pairs.yaml"))
    assert shipped.schedule.steps == 0
    assert shipped.schedule.tokens % shipped.schedule.longest == 0
    (tmp_path / "bad.yaml").write_text("schedule: {}\nnoise: 1")
    with pytest.raises(UsageError, match="schedule"):
        PairsSettings.read(tmp_path / "bad.yaml")
