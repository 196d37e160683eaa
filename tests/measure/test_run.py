import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diffquant.checkpoints.source import open_source
from diffquant.checkpoints.texts import load_text
from diffquant.checkpoints.tokenizer import load_tokenizer
from diffquant.errors import CheckpointError, DiffQuantError, FailedCellsError, UsageError
from diffquant.measure.cells import Cell
from diffquant.measure.protocols import hellaswag
from diffquant.measure.results import TaskResult
from diffquant.measure.sweep import subject
from diffquant.measure.sweep.grid import SweepOptions
from diffquant.measure.sweep.plan import describe_work, estimate_seconds, plan_sweep
from diffquant.measure.sweep.run import evaluate, run_sweep
from diffquant.measure.tasks import perplexity
from diffquant.measure.torch_model import TorchModel
from diffquant.model.adapters import sizes
from diffquant.model.modeling import DiffTransformer
from diffquant.quantization.loading import load
from diffquant.quantization.quantize import quantize
from diffquant.recipe import Recipe
from diffquant.support.installation import find_commit, result_version_digest
from diffquant.support.plain_data import plain_data_digest
from tests.support import tiny_lm
from tests.support.checkpoints import write_checkpoint
from tests.support.tables import in_one_test
from tests.support.thorough import sampled

READING = {"characters": 600, "window": 64, "stride": 32}
GRID = {"bits": (16, 4), "targets": ("logits", "weights"), "granularities": ("row", "tensor"), "dtype": "float32"}
OPTIONS = SweepOptions(tasks=("hellaswag", "perplexity"), task_options={"limit": 6} | READING, **GRID)
CELLS = 2 * 5
PERPLEXITY = {"tasks": ("perplexity",), "task_options": READING}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_lm.write_diff_v2(tmp_path_factory.mktemp("models") / "diff-v2")


@pytest.fixture(scope="module")
def output(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    run_sweep([model], OPTIONS, folder)
    return folder


def test_a_dry_run_says_what_is_to_be_measured_and_about_how_long(model, copy_of, tmp_path):
    def planned(options, folder):
        run = plan_sweep([model], options, folder / "cells", None)[0]
        return replace(run, cells=[replace(cell, result=cell.read()) for cell in run.cells])

    nothing = describe_work(planned(OPTIONS, tmp_path / "new"))
    assert nothing.count("\n") == CELLS
    assert re.match(rf"{CELLS} cells to measure; about \d+ (s|min), if cells run one at a time\n", nothing)
    assert not (tmp_path / "new").exists()
    held = planned(OPTIONS, copy_of)
    assert describe_work(held) == f"nothing to measure; {CELLS} are already measured"
    taken = [cell.result.seconds for cell in held.cells]
    more = planned(replace(OPTIONS, bits=(16, 4, 3)), copy_of)
    headline, *missing = describe_work(more).splitlines()
    assert headline.startswith(f"8 cells to measure; {CELLS} are already measured; about ")
    assert min(taken) * 8 <= estimate_seconds(more) <= max(taken) * 8
    assert sum("perplexity" in caption for caption in missing) == 4


@pytest.fixture
def copy_of(output, tmp_path):
    return shutil.copytree(output, tmp_path / "sweep")


@pytest.fixture
def loads(monkeypatch):
    """What was loaded, as weight schemes."""
    seen = []

    def counted(path, recipe, *others, **named):
        seen.append(str(recipe.weights))
        return load(path, recipe, *others, **named)

    monkeypatch.setattr(subject, "load", counted)
    return seen


def test_a_cell_holds_what_evaluating_its_recipe_and_quantize_give(model, output, tmp_path):
    result = run_sweep([model], OPTIONS, output)
    assert len(result.cells) == CELLS
    assert not result.failed_cells
    tokenizer, text = load_tokenizer(model), load_text(characters=600)
    plain, quantized = (TorchModel(load(model, recipe), tokenizer) for recipe in (None, Recipe.of(weights="4:row")))
    point = next(p for p in result.points if p.label == "weights 4:row")
    outcome = hellaswag.evaluate_hellaswag(quantized, hellaswag.load_items(limit=6))
    assert result.result_and_baseline(point, "hellaswag")[0].choices == outcome.choices
    reference = perplexity.compute_reference(plain, text, 64, 32)
    score = perplexity.compute_perplexity(quantized, text, 64, 32, reference=reference)
    measured = result.result_and_baseline(point, "perplexity")[0].details
    assert measured["perplexity"] == pytest.approx(score["perplexity"])
    assert measured["kl"] == pytest.approx(score["kl"])
    report = quantize(model, tmp_path / "low", Recipe.of(weights="4:row"))
    assert next(c for c in result.cells if c.point is point).result.weight_bytes == report.bytes_after


@pytest.mark.parametrize(
    "recipe", [{"kv": "2:row", "logits": "3:tensor"}, {"weights": "4:row", "kv": "2:row"}], ids=str
)
def test_a_folder_is_measured_under_the_recipe_that_it_records_too(model, tmp_path, recipe):
    quantize(model, tmp_path / "folder", Recipe.of(**recipe))
    options = replace(OPTIONS, **PERPLEXITY, bits=(16,), targets=("weights",))
    result = run_sweep([tmp_path / "folder", model], options, tmp_path / "out")
    found = [(point.model.name, point.label) for point in result.points]
    assert found == [("folder", "16 bits"), ("folder", "recipe own"), (model.name, "16 bits")]
    tokenizer, text = load_tokenizer(model), load_text(characters=600)
    measured = []
    for own in (Recipe(), None):
        loaded = TorchModel(load(tmp_path / "folder", own), tokenizer)
        measured.append(perplexity.compute_perplexity(loaded, text, 64, 32)["perplexity"])
    found = [result.result_and_baseline(point, "perplexity")[0].details["perplexity"] for point in result.points[:2]]
    assert found == pytest.approx(measured)
    assert abs(found[0] / found[1] - 1) > 1e-3


def test_a_sweep_measured_in_parts_is_the_whole_sweep(model, output, tmp_path, loads):
    for target in OPTIONS.targets:
        run_sweep([model], replace(OPTIONS, targets=(target,)), tmp_path)
    loads.clear()
    parts = run_sweep([model], OPTIONS, tmp_path)
    assert loads == []
    whole = run_sweep([model], OPTIONS, output)
    assert [cell.result for cell in parts.cells] == [cell.result for cell in whole.cells]


def cut(cell):
    return json.dumps(cell)[:-40]


def empty(cell):
    return json.dumps(cell | {"result": {}, "sha256": plain_data_digest({})})


def another_digit(cell):
    changed = cell["result"] | {"perplexity": cell["result"]["perplexity"] + 0.125}
    return json.dumps(cell | {"result": changed})


def without_digest(cell):
    return json.dumps({name: value for name, value in cell.items() if name != "sha256"})


@pytest.mark.parametrize(
    "damage", sampled([another_digit, cut, empty, without_digest, lambda _: "[" * 100_000, lambda _: "[]"], 3)
)
def test_a_damaged_cell_is_measured_again_and_comes_out_the_same(model, copy_of, damage):
    file = next(f for f in sorted((copy_of / "cells").iterdir()) if "perplexity" in json.loads(f.read_text())["result"])
    content = json.loads(file.read_text())
    file.write_text(damage(content))
    run_sweep([model], OPTIONS, copy_of)
    again = json.loads(file.read_text())
    assert again["key"] == content["key"]
    for result in (content["result"], again["result"]):
        del result["seconds"]
    assert again["result"] == content["result"]


def test_a_model_that_is_replaced_during_a_sweep_leaves_no_cell_under_its_old_address(tmp_path, monkeypatch):
    model = tiny_lm.write_diff_v2(tmp_path / "model")
    other = tiny_lm.write_diff_v2(tmp_path / "other", seed=5)
    score = perplexity.compute_perplexity
    scored = []

    def score_and_replace(*arguments, **named):
        result = score(*arguments, **named)
        scored.append(result)
        if len(scored) == 2:
            shutil.rmtree(model)
            shutil.copytree(other, model)
        return result

    monkeypatch.setattr(perplexity, "compute_perplexity", score_and_replace)
    options = replace(OPTIONS, **PERPLEXITY)
    result = run_sweep([model], options, tmp_path / "out")
    with pytest.raises(FailedCellsError):
        result.require_complete()
    measured = [cell for cell in result.cells if cell.result]
    assert len(measured) == 1
    assert {cell.error for cell in result.cells if cell.error} == {
        f"{model} changed while it was in use; run the same command again"
    }
    run_sweep([model], options, tmp_path / "out").require_complete()


def test_a_model_is_known_by_its_contents_and_not_by_its_place_or_dates(tmp_path):
    model = tiny_lm.write_diff_v2(tmp_path / "model")
    source, moved = open_source(model), shutil.copytree(model, tmp_path / "moved")
    assert source.fingerprint == open_source(moved).fingerprint
    for file in model.iterdir():
        file.touch()
    source.check_unchanged()
    (model / "tokenizer_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="changed while"):
        source.check_unchanged()
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert open_source(moved).fingerprint != source.fingerprint


def test_eval_refuses_a_backend_that_cannot_quantize_logits_before_it_loads(model, monkeypatch):
    monkeypatch.setattr("diffquant.measure.sweep.subject.load", None)
    with pytest.raises(UsageError, match="'flashdiff1' keeps logits inside its kernel"):
        evaluate(model, Recipe.of(logits="4:row"), replace(OPTIONS, attention="flashdiff1"))


@in_one_test("change", [{"limit": 5}, {"characters": 500}, {"stride": 16}, {"batch_tokens": 100}])
def test_what_a_result_depends_on_is_in_its_address(model, output, tmp_path, change):
    names = {file.name for file in (output / "cells").iterdir()}
    batches = {name: change.pop(name) for name in ("batch_tokens",) if name in change}
    changed = replace(OPTIONS, bits=(16,), task_options=OPTIONS.task_options | change, **batches)
    run_sweep([model], changed, tmp_path)
    assert {file.name for file in (tmp_path / "cells").iterdir()} - names


def test_a_change_of_the_code_that_computes_a_cell_measures_it_again(model, copy_of, loads, monkeypatch):
    def digest(modules):
        return "0123456789abcdef" if "diffquant.measure.tasks.perplexity" in modules else result_version_digest(modules)

    monkeypatch.setattr("diffquant.measure.sweep.cell.result_version_digest", digest)
    result = run_sweep([model], OPTIONS, copy_of)
    assert loads == ["16", "4:row", "4:tensor"]
    assert len(list((copy_of / "cells").iterdir())) == CELLS + CELLS // 2
    written = json.loads((copy_of / "sweep.json").read_text())
    codes = {(cell["task"], cell["code"]) for cell in written["cells"]}
    assert ("perplexity", "0123456789abcdef") in codes
    assert len(codes) == 2
    assert (
        {cell["result"].get("commit") for cell in written["cells"]}
        == {written["settings"]["commit"]}
        == {find_commit()}
    )
    assert result.cells[0].key["code"] != "0123456789abcdef"


def test_results_of_models_with_moving_angles_have_a_version_apart(tmp_path, monkeypatch):
    longrope = {"rope_type": "longrope", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}
    changes = {"head_dim": 16, "rope_parameters": longrope | {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}}
    written = [("llama", {}), ("phi4flash", {}), ("llama", changes)]
    sources = [
        open_source(write_checkpoint(tmp_path / str(n), source, **each)) for n, (source, each) in enumerate(written)
    ]

    def versions():
        subjects = (subject.CheckpointSubject(source, torch.float32, "cpu") for source in sources)
        return [result_version_digest(each.python_modules(Recipe())) for each in subjects]

    before = versions()
    assert before[0] == before[1] != before[2]
    monkeypatch.setattr(sizes, "RESULT_VERSION", 2)
    assert [new == old for new, old in zip(versions(), before, strict=True)] == [True, True, False]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"code": "0123456789abcdef"}, "other code"),
        ({"versions": {"torch": "1.0"}}, f"torch 1.0 (now {torch.__version__})"),
    ],
)
def test_a_sweep_says_in_one_line_why_cells_of_a_folder_are_measured_again(
    model, copy_of, caplog, monkeypatch, change, reason
):
    for file in (copy_of / "cells").iterdir():
        entry = json.loads(file.read_text())
        if entry["key"]["task"]["name"] == "perplexity":
            key = entry["key"] | change | {"versions": entry["key"]["versions"] | change.get("versions", {})}
            Cell(None, "perplexity", key=key, folder=copy_of / "cells").write(TaskResult.from_dict(entry["result"]))
            file.unlink()
    monkeypatch.setattr(subject.CheckpointSubject, "measure", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run_sweep([model], OPTIONS, copy_of)
    assert caplog.messages == [
        f"{CELLS // 2} of the {CELLS // 2} missing cells were measured in {copy_of}/cells before, but with {reason}; "
        "they are measured again"
    ]


def test_an_interrupted_sweep_keeps_its_cells_and_goes_on(model, tmp_path, monkeypatch):
    measure, calls = subject.CheckpointSubject.measure, []

    def interrupted(self, task, *others):
        calls.append(task.name)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return measure(self, task, *others)

    monkeypatch.setattr(subject.CheckpointSubject, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt, match=rf"3 of {CELLS} cells are done.*same command again"):
        run_sweep([model], OPTIONS, tmp_path)
    assert len(list((tmp_path / "cells").iterdir())) == 3
    run_sweep([model], OPTIONS, tmp_path)
    assert len(calls) == 4 + CELLS - 3
    assert len(list((tmp_path / "cells").iterdir())) == CELLS


def test_a_failed_cell_is_recorded_the_rest_goes_on_and_it_is_retried(model, tmp_path, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(
            DiffTransformer,
            "check_quantizers_ran",
            lambda self: (_ for _ in ()).throw(DiffQuantError("layer 1 did not")),
        )
        result = run_sweep([model], OPTIONS, tmp_path)
    assert {cell.point.target for cell in result.failed_cells} == {"logits"}
    assert len(result.failed_cells) == 4
    assert all(cell.error == "layer 1 did not" for cell in result.failed_cells)
    with pytest.raises(FailedCellsError, match="4 of 10 cells failed") as error:
        result.require_complete()
    assert error.value.exit_code == 3
    assert len(list((tmp_path / "cells").glob("*.failed.json"))) == 4
    run_sweep([model], OPTIONS, tmp_path).require_complete()
    assert not list((tmp_path / "cells").glob("*.failed.json"))


def test_every_logits_cell_reports_every_layer(model, output):
    result = run_sweep([model], OPTIONS, output)
    reports = [cell.result.logit_report for cell in result.cells if cell.point.target == "logits"]
    assert [[layer["layer"] for layer in report] for report in reports] == [[0, 1]] * 4
    assert all(layer["calls"] and layer["step_max"] > 0 for report in reports for layer in report)
    assert not any(cell.result.logit_report for cell in result.cells if cell.point.target != "logits")


def test_progress_ends_at_all_and_never_goes_back(model, tmp_path):
    told = []
    run_sweep([model], OPTIONS, tmp_path, lambda done, total, what: told.append((done, total)))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (CELLS, CELLS)
    assert all(done < CELLS for done, _ in told[:-1])


def test_bad_input_is_refused_before_any_cell(model, tmp_path):
    with pytest.raises(CheckpointError):
        run_sweep([model, tmp_path / "absent"], OPTIONS, tmp_path / "out")
    with pytest.raises(UsageError, match="unknown task 'arc'"):
        SweepOptions(tasks=("arc", "perplexity"))
    absent = SweepOptions(tasks=("perplexity",), task_options={"text": tmp_path / "absent"})
    with pytest.raises(UsageError, match="absent"):
        run_sweep([model], absent, tmp_path / "out")
    for task_options, said in (({"limit": 0}, "limit must be 1 or more"), ({"window": 8, "stride": 9}, "stride 9")):
        with pytest.raises(UsageError, match=said):
            run_sweep([model], replace(OPTIONS, task_options=task_options), tmp_path / "out")
    (tmp_path / "own.yaml").write_text("kv: 8")
    for given, said in (
        ({"dtype": "int8"}, "dtype"),
        ({"attention": "fast"}, "unknown attention backend 'fast'"),
        ({"attention": "flashdiff1"}, "'flashdiff1' keeps logits inside its kernel"),
        ({"recipes": (tmp_path / "own.yaml",)}, r"rename own\.yaml"),
    ):
        with pytest.raises(UsageError, match=said):
            run_sweep([model], SweepOptions(**given), tmp_path / "out")
    quantize(model, tmp_path / "packed", Recipe.of(weights="8:row"))
    nowhere = tmp_path / "nowhere.yaml"
    nowhere.write_text("overrides: {model.layers.77.self_attn.k: 8}")
    with pytest.raises(UsageError, match=r"layers\.77\.self_attn\.k' match no layer"):
        run_sweep([tmp_path / "packed"], SweepOptions(recipes=(nowhere,)), tmp_path / "out")
    (tmp_path / "other").mkdir()
    twin = shutil.copy(nowhere, tmp_path / "other")
    with pytest.raises(UsageError, match="rename all but one of nowhere"):
        run_sweep([model], SweepOptions(recipes=(nowhere, Path(twin))), tmp_path / "out")
    assert not list(tmp_path.glob("out/cells/*"))


def test_16_bit_kv_costs_what_its_shapes_say_and_4_bit_less_than_a_third(model, tmp_path):
    result = run_sweep([model], SweepOptions(bits=(4,), targets=("kv",), task_options={"limit": 2}), tmp_path)
    full, low = (cell.result.kv_bytes for cell in result.cells)
    config = load(model, dtype=torch.float32).config
    spec = config.diff_spec
    assert full == 2 * config.num_hidden_layers * spec.kv_pairs * (spec.head_dim + spec.value_dim)
    assert low == config.num_hidden_layers * spec.kv_pairs * (2 * 4 + 2 * 2)
