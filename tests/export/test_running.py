"""Exported folders at work: our generation, onnxruntime-genai, the example, the evaluations, the command line."""

import json
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from typer.testing import CliRunner

import diffquant
from diffquant.calib.calibration.kv_cache import calibrate_cache
from diffquant.errors import NonFiniteError, UsageError
from diffquant.measure.sweep.grid import SweepOptions
from diffquant.measure.sweep.result import json_rows
from diffquant.measure.sweep.run import evaluate, run_sweep
from diffquant.measure.tasks.perplexity import Perplexity
from diffquant.measure.torch_model import TorchModel
from diffquant.onnx import ExportOptions, Generator, export
from diffquant.onnx.runtime import generation, session
from diffquant.onnx.runtime.scoring import OnnxLanguageModel
from diffquant.onnx.runtime.session import OnnxModel
from diffquant.onnx.targets import runtime_of
from diffquant.support.progress import report_nothing
from diffquant.verbs import cli
from tests.support import tiny_lm
from tests.support.checkpoints import edit_json, write_checkpoint
from tests.support.tables import in_one_test

TASK_OPTIONS = {"limit": 4, "characters": 1500, "window": 64, "stride": 32}
PROMPT = "It was a dark and stormy night, and the"
EXAMPLE = Path(__file__).parents[2] / "examples" / "onnxruntime_minimal.py"


@pytest.fixture(scope="module", params=["diffllama", "unilm-v2"])
def source(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "model"
    sizes = {"vocab_size": tiny_lm.WORDS, "max_position_embeddings": 256, "eos_token_id": 1}
    write_checkpoint(folder, request.param, **sizes)
    tiny_lm.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[{}, {"kv_bits": 8, "weights": "4:g32", "accuracy_level": 1}], ids=["", "low"])
def folder(request, source, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "out"
    options = ExportOptions.parse(**request.param)
    ranges = calibrate_cache(source, diffquant.Recipe(weights=options.weights)) if options.kv_bits < 16 else None
    export(source, out, options, ranges=ranges)
    return out


@pytest.fixture(scope="module")
def plain(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("plain") / "out"
    export(source, out)
    return out


def by_whole_sequences(folder, ids, new):
    """Greedy continuation without a cache, the whole sequence each time."""
    model = OnnxModel(folder, 1)
    ids = list(ids)
    for _ in range(new):
        array = np.array([ids])
        (logits,), _ = model.run(array, np.ones_like(array), model.allocate_cache(1))
        ids.append(int(logits[0, -1].argmax()))
        if ids[-1] == 1:
            break
    return ids


def test_tokens_are_those_of_whole_sequences_and_the_cache_stays_in_place(folder):
    generator = Generator(folder, 1)
    ids = generator.text.encode(PROMPT)
    made = list(generator.generate_tokens(ids, 20))
    wanted = by_whole_sequences(folder, ids, 20)[len(ids) :]
    assert made == [token for token in wanted if token != 1]
    assert generator.speed.new_tokens == len(made)
    assert generator.speed.cache_bytes == generator.model.cache.bytes_per_token * (len(ids) + 20)


def test_tokens_are_those_of_torch(source, plain):
    generator = Generator(plain, 1)
    ids = generator.text.encode(PROMPT)
    oracle = diffquant.load(source).generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0].tolist()
    assert ids + list(generator.generate_tokens(ids, 20)) == [token for token in oracle if token != 1]


@pytest.fixture
def cutting(plain, tmp_path):
    """An export whose tokenizer.json cuts and pads, as a fine-tuning left it."""
    out = shutil.copytree(plain, tmp_path / "cutting")
    cut = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    padded = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None}
    padded |= {"pad_id": 1, "pad_type_id": 0, "pad_token": "</s>"}
    edit_json(out / "tokenizer.json", truncation=cut, padding=padded)
    return out


def test_prompts_are_encoded_as_transformers_encodes_them_whatever_the_tokenizer_cuts_and_pads(cutting):
    wanted = AutoTokenizer.from_pretrained(cutting)(PROMPT).input_ids
    assert 8 < len(wanted) < 64
    assert Generator(cutting, 1).text.encode(PROMPT) == wanted


def test_tokens_that_stand_in_the_tokenizers_config_alone_are_known_to_an_export(source, tmp_path):
    shutil.copytree(source, tmp_path / "source")
    edit_json(tmp_path / "source" / "tokenizer_config.json", additional_special_tokens=["<|user|>"])
    export(tmp_path / "source", tmp_path / "out", ExportOptions())
    prompt = f"<|user|> {PROMPT}<|user|>"
    ids = Generator(tmp_path / "out", 1).text.encode(prompt)
    assert ids == AutoTokenizer.from_pretrained(tmp_path / "source")(prompt).input_ids
    assert ids.count(ids[-1]) == 2


@pytest.mark.parametrize("logits", ["4:tensor", "4:head:shift", "4:row"])
def test_a_prompt_longer_than_a_chunk_is_continued_as_torch_continues_it(source, tmp_path, monkeypatch, logits):
    monkeypatch.setattr(generation, "_PREFILL_CHUNK", 7)
    export(source, tmp_path / "out", ExportOptions.parse(logits=logits))
    generator, model = Generator(tmp_path / "out", 1), diffquant.load(source, {"logits": logits})
    for first in range(2, 14):
        ids = generator.text.encode(PROMPT)[:first] * 3
        oracle = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0].tolist()
        assert ids + list(generator.generate_tokens(ids, 8)) == [token for token in oracle if token != 1]


def test_running_does_not_import_torch(plain):
    code = f"""
import sys
from diffquant.onnx.runtime.generation import Generator
list(Generator({str(plain)!r}).stream({PROMPT!r}, 2))
print("torch" in sys.modules, "transformers" in sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout.split() == ["False", "False"], found.stderr


def test_sampling_follows_its_seed(folder):
    generator = Generator(folder, 1)
    texts = ["".join(generator.stream(PROMPT, 12, temperature=0.8, seed=seed)) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    with pytest.raises(diffquant.DiffQuantError, match="prompt is empty"):
        list(generator.stream(" "))
    with pytest.raises(diffquant.DiffQuantError, match="context ends at 256"):
        list(generator.stream(PROMPT * 60))


@in_one_test("temperature", [0.4, 1.5])
def test_samples_follow_the_softmax_of_logits_over_the_temperature(temperature):
    logits, draws = np.array([1.0, 0.2, -0.7, 1.6], np.float32), 4000
    pick = generation._sampler(temperature, seed=3)
    wanted = torch.from_numpy(logits / temperature).double().softmax(0).numpy()
    counts = np.bincount([pick(logits) for _ in range(draws)], minlength=4)
    # Four standard deviations of a count.
    assert (np.abs(counts - draws * wanted) < 4 * np.sqrt(draws * wanted * (1 - wanted))).all()


@in_one_test("temperature", [1e-40, 5e-324])
def test_a_temperature_near_zero_chooses_the_likeliest(temperature):
    assert generation._sampler(temperature, seed=3)(np.array([9.0, 7e4, -1e30, 8e4], np.float32)) == 3


@in_one_test("temperature", [0.0, 1.0])
def test_logits_that_overflow_float16_are_refused_and_no_token_is_chosen(tmp_path, temperature):
    checkpoint = tiny_lm.write_diff_v2(tmp_path / "model")
    tensors = load_file(checkpoint / "model.safetensors")
    # What goes into down_proj is beyond float16, and no weight is.
    larger = {name: x * (3000 if "up_proj" in name or "gate_proj" in name else 1) for name, x in tensors.items()}
    save_file(larger, checkpoint / "model.safetensors", metadata={"format": "pt"})
    for dtype in ("float32", "float16"):
        export(checkpoint, tmp_path / dtype, ExportOptions(dtype=dtype))
    assert list(Generator(tmp_path / "float32", 1).stream(PROMPT, 4, temperature))
    said = "float16 computes NaN or infinity in float16, and no token can be chosen: export it with dtype='float32'"
    with pytest.raises(NonFiniteError, match=said):
        list(Generator(tmp_path / "float16", 1).stream(PROMPT, 4, temperature))


def test_a_token_that_the_model_does_not_know_is_refused_by_number(plain):
    with pytest.raises(UsageError, match=rf"token {tiny_lm.WORDS} \(.*embedding has {tiny_lm.WORDS} rows"):
        next(Generator(plain, 1).generate_tokens([5, tiny_lm.WORDS, 7], 4))
    with pytest.raises(UsageError, match="-1 is no token id"):
        next(Generator(plain, 1).generate_tokens([5, -1, 7], 4))


def test_a_text_ends_with_the_context(source, plain):
    endless = Generator(plain, 1)
    endless._ends = ()
    ids = np.random.default_rng(0).integers(2, tiny_lm.WORDS, 256).tolist()
    for room in (1, 3):
        made = list(endless.generate_tokens(ids[:-room], 64))
        assert len(made) == room
        with torch.inference_mode():
            logits = diffquant.load(source)(torch.tensor([ids[:-room] + made[:-1]])).logits[0, -room:]
        assert made == logits.argmax(-1).tolist()
    with pytest.raises(UsageError, match="the prompt has 256 tokens; the model's context ends at 256"):
        next(endless.generate_tokens(ids, 1))


@pytest.mark.parametrize("text", ["café ☃ 😀 naïve", "half a character ☃"])
def test_pieces_are_whole_characters_and_the_text_is_that_of_all_tokens(plain, monkeypatch, text):
    generator, tokenizer = Generator(plain, 1), tiny_lm.tokenizer()
    # The second one ends within its last character.
    ids = tokenizer(text).input_ids[: -1 if text.endswith("☃") else None]
    monkeypatch.setattr(generator, "generate_tokens", lambda *_: iter([0, *ids, 0]))
    *pieces, last = generator.stream(PROMPT)
    assert "".join([*pieces, last]) == tokenizer.decode([0, *ids, 0], skip_special_tokens=True)
    assert not any("\ufffd" in piece for piece in pieces)


def test_genai_runs_the_folder_as_it_is(folder):
    genai = pytest.importorskip("onnxruntime_genai")
    ids = tiny_lm.tokenizer()(PROMPT)["input_ids"]
    wanted = by_whole_sequences(folder, ids, 16)
    parameters = genai.GeneratorParams(genai.Model(str(folder)))
    parameters.set_search_options(max_length=len(ids) + 16, do_sample=False)
    generator = genai.Generator(genai.Model(str(folder)), parameters)
    generator.append_tokens(np.array([ids], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    assert list(generator.get_sequence(0))[: len(wanted)] == wanted


def test_genai_is_told_of_the_cuda_device_and_otherwise_finds_the_same_folder(source, plain, tmp_path):
    genai = pytest.importorskip("onnxruntime_genai")
    folder = tmp_path / "out"
    export(source, folder, ExportOptions.parse(genai_device="cuda:1"))
    on_cpu, on_cuda = (json.loads((f / "genai_config.json").read_text()) for f in (plain, folder))
    session = on_cuda["model"]["decoder"]["session_options"]
    assert session["provider_options"] == [{"cuda": {"device_id": "1", "use_tf32": "0"}}]
    session["provider_options"] = []
    assert on_cuda == on_cpu
    # It reads the options, and misses the provider where it was built without.
    config = genai.Config(str(folder))
    if not genai.is_cuda_available():
        with pytest.raises(RuntimeError, match=r"(?i)cuda"):
            genai.Model(config)
    config.clear_providers()
    assert genai.Model(config).device_type.lower() == "cpu"


def by_the_example(folder, prompt=PROMPT):
    found = subprocess.run([sys.executable, EXAMPLE, folder, prompt], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout.removesuffix("\n")


def test_the_example_needs_onnxruntime_alone(folder):
    wanted = by_whole_sequences(folder, tiny_lm.tokenizer()(PROMPT)["input_ids"], 32)
    assert by_the_example(folder) == tiny_lm.tokenizer().decode(wanted, skip_special_tokens=True)


def test_the_example_reads_whole_prompts_and_ends_texts(source, cutting, tmp_path):
    ids = tiny_lm.tokenizer()(PROMPT)["input_ids"]
    stop = by_whole_sequences(cutting, ids, 5)[-1]
    ending = shutil.copytree(source, tmp_path / "ending")
    (ending / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, stop]}))
    export(ending, tmp_path / "out")
    shutil.copy(cutting / "tokenizer.json", tmp_path / "out")
    made = list(Generator(tmp_path / "out", 1).generate_tokens(ids, 32))
    assert len(made) < 5
    assert by_the_example(tmp_path / "out") == tiny_lm.tokenizer().decode([*ids, *made, stop], skip_special_tokens=True)


def test_tasks_run_on_an_exported_folder(source, plain):
    options = SweepOptions(tasks=("hellaswag", "perplexity"), task_options=TASK_OPTIONS | {"limit": 3})
    ours = evaluate(plain, None, options, runtime_of=runtime_of)
    oracle = evaluate(source, None, replace(options, dtype="float32"))
    assert ours["hellaswag"].choices == oracle["hellaswag"].choices
    perplexities = [results["perplexity"].details["perplexity"] for results in (ours, oracle)]
    assert perplexities[0] == pytest.approx(perplexities[1], rel=1e-4)


def test_an_export_is_measured_as_it_is(plain):
    with pytest.raises(diffquant.DiffQuantError, match="has a fixed precision"):
        evaluate(plain, diffquant.Recipe.of(kv=8), SweepOptions(), runtime_of=runtime_of)
    with pytest.raises(diffquant.DiffQuantError, match=r"leave out .* scales"):
        evaluate(plain, None, SweepOptions(scales=(Path("scales.safetensors"),)), runtime_of=runtime_of)


def test_an_export_cannot_be_spread_over_devices(source, plain, tmp_path):
    options = SweepOptions(tasks=("hellaswag",), device_map="auto", task_options={"limit": 1})
    with pytest.raises(diffquant.DiffQuantError, match=r"an exported folder on one device: leave out device_map"):
        evaluate(plain, None, options, runtime_of=runtime_of)
    with pytest.raises(diffquant.DiffQuantError, match=f"leave out device_map, or {plain}"):
        run_sweep([source, plain], options, tmp_path / "out", runtime_of=runtime_of)


def test_the_command_line_exports_verifies_and_runs(source, tmp_path):
    out = tmp_path / "out"
    run = CliRunner().invoke
    arguments = ["export", str(source), "-o", str(out), "--weights", "4:g32", "--kv", "8", "--embed", "8", "--json"]
    exported = run(cli.app, arguments)
    assert exported.exit_code == 0, exported.output
    assert json.loads(exported.stdout)["floor"] == "1.27"
    verified = run(cli.app, ["verify", str(out), str(source)])
    assert verified.stdout.startswith("PASS: "), verified.output
    assert len(verified.stdout.splitlines()[0]) <= 80
    detailed = run(cli.app, ["verify", str(out), str(source), "--details"]).stdout
    assert detailed.startswith("PASS: ")
    assert "chunked prefill" in detailed
    rows = [line for line in detailed.splitlines() if line.startswith(" ")]
    assert max(map(len, rows)) <= 80
    missed = run(cli.app, ["verify", str(out), str(source), "--tolerance", "1e-9", "--json"])
    assert missed.exception.exit_code == 4
    record = json.loads(missed.stdout)
    assert not record["passed"]
    assert record["verdict"].startswith("FAIL: ")
    assert {measure["limit"] for route in record["routes"] for measure in [route["logits"]] if measure} == {1e-9}
    assert next(iter(record["tokens"].values()))["n"] == record["positions"]
    continued = run(cli.app, ["run", str(out), "--prompt", PROMPT, "--max-new-tokens", "4", "--threads", "1"])
    assert continued.exit_code == 0
    assert "tokens/s" in continued.stderr


def test_a_session_without_a_library_says_so_once(plain, monkeypatch, caplog):
    monkeypatch.delenv("DIFFQUANT_NATIVE_LIBRARY", raising=False)
    monkeypatch.setattr(session, "library_path", lambda: None)
    session._say_once_that_bodies_run.cache_clear()
    for _ in range(2):
        OnnxModel(plain, 1)
    assert caplog.messages == [
        "no native library is built: ONNX Runtime computes the model by the ops' function bodies, which is slower; "
        "build it with python -m diffquant.onnx.native"
    ]


def test_lm_eval_scores_and_generates_with_it(source, plain):
    from lm_eval.api.instance import Instance

    from diffquant.measure.protocols.harness_plugin import HarnessModel

    tokenizer = tiny_lm.tokenizer()
    models = [
        OnnxLanguageModel(OnnxModel(plain, 1, every_position=True), tokenizer),
        TorchModel(diffquant.load(source, dtype=torch.float32), tokenizer),
    ]
    adapters = [HarnessModel(model, 256, report_nothing) for model in models]
    pairs = [Instance("loglikelihood", {}, (PROMPT, text), i) for i, text in enumerate((" moon", " sea was"))]
    ours, oracle = (adapter.loglikelihood(pairs) for adapter in adapters)
    assert [p for p, _ in ours] == pytest.approx([p for p, _ in oracle], abs=1e-3)
    asked = Instance("generate_until", {}, (PROMPT, {"until": ["\n\n"], "max_gen_toks": 12}), 0)
    assert adapters[0].generate_until([asked]) == adapters[1].generate_until([asked])


@in_one_test(
    ("recipe", "options", "left_out"),
    [
        ({"logits": "4:row"}, {}, "(logits 4:row) is not part of the export; give logits to round in the export, too"),
        ({"logits": "4:row"}, {"logits": "4:row"}, ""),
        ({"logits": "4:row", "p": 8}, {"logits": "4:row"}, "(p 8:row) is not part of the export"),
        ({"kv": "e4m3"}, {}, "(k e4m3:row, v e4m3:row) is not part of the export; give kv to round in the export, too"),
    ],
)
def test_a_recipe_left_out_is_said_with_the_options_that_round(source, tmp_path, recipe, options, left_out):
    diffquant.quantize(source, tmp_path / "low", {"weights": "4:g32"} | recipe)
    notes = diffquant.export(tmp_path / "low", tmp_path / "onnx", **options).notes
    said = [note.removeprefix("the checkpoint's recipe ") for note in notes if "not part of the export" in note]
    assert said == [left_out] * bool(left_out)


@in_one_test(("scheme", "said"), [("8", True), ("8:static", False)])
def test_a_cache_exported_at_another_scheme_than_the_recipes_is_said(source, tmp_path, caplog, scheme, said):
    caplog.set_level(logging.INFO, "diffquant.verbs")
    caplog.clear()
    diffquant.quantize(source, tmp_path / "low", {"weights": "4:g32", "kv": scheme})
    diffquant.export(tmp_path / "low", tmp_path / "onnx")
    assert ("exported at 8:static, calibrated per channel, not at" in caplog.text) is said


def test_an_export_is_a_row_of_the_sweep_compared_with_its_source(source, plain, tmp_path):
    options = SweepOptions(tasks=("hellaswag", "perplexity"), bits=(8,), task_options=TASK_OPTIONS)
    result = run_sweep([plain, source], replace(options, dtype="float32"), tmp_path / "sweep", runtime_of=runtime_of)
    _, _, exported = result.points
    assert exported.compared_with == source
    records = json_rows(result)
    assert records[2]["hellaswag difference"] == 0
    assert records[2]["hellaswag kl"] == pytest.approx(0, abs=1e-5)
    assert records[2]["hellaswag margin_change"] == pytest.approx(0, abs=1e-4)
    assert records[2]["perplexity"] == pytest.approx(records[0]["perplexity"], rel=1e-4)
    assert records[2]["kl"] == pytest.approx(0, abs=1e-6)
    assert result.find_any_result(exported).weight_bytes == sum(
        (plain / name).stat().st_size for name in ("model.onnx", "model.onnx.data")
    )
    assert "onnx" in result.table()
    again = run_sweep([plain], options, tmp_path / "alone", runtime_of=runtime_of)
    assert json_rows(again)[0]["hellaswag difference"] is None


def test_an_export_of_a_quantized_checkpoint_is_compared_with_what_was_quantized(source, tmp_path):
    quantized, folder = tmp_path / "quantized", tmp_path / "onnx"
    recipe = diffquant.Recipe.of(weights="4:g32", overrides={"model.layers.1.self_attn.logits": "6:row"})
    diffquant.quantize(source, quantized, recipe)
    report = export(quantized, folder, ExportOptions(kv_bits=8), ranges=calibrate_cache(quantized))
    assert any("logits 16 or 6:row) is not part of the export" in note for note in report.notes)
    result = run_sweep(
        [source, folder], SweepOptions(bits=(), task_options={"limit": 2}), tmp_path / "sweep", runtime_of=runtime_of
    )
    _, exported = result.points
    assert (exported.compared_with, exported.scheme_text) == (source, "4:g32 kv 8")


def test_an_export_that_is_replaced_during_a_sweep_is_not_recorded(plain, source, tmp_path, monkeypatch):
    folder = tmp_path / "onnx"
    shutil.copytree(plain, folder)
    export(source, tmp_path / "other", ExportOptions(embed_bits=8))
    run_task = Perplexity.run

    def run_and_replace(*arguments):
        result = run_task(*arguments)
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "other", folder)
        return result

    monkeypatch.setattr(Perplexity, "run", run_and_replace)
    options = SweepOptions(tasks=("perplexity",), task_options={"characters": 1500, "window": 64, "stride": 32})
    result = run_sweep([folder], options, tmp_path / "sweep", runtime_of=runtime_of)
    assert [cell.error for cell in result.cells] == [
        f"{folder} changed while it was in use; run the same command again"
    ]


def test_onnx_runtime_reports_to_nobody_what_it_runs(tmp_path):
    # What it has to report waits in a database below HOME; in CI it reports nothing anyway.
    kept = {name: value for name, value in os.environ.items() if name not in ("CI", "ORT_DISABLE_TELEMETRY")}
    program = "import diffquant, onnxruntime, onnxruntime_genai"
    subprocess.run([sys.executable, "-c", program], env=kept | {"HOME": str(tmp_path)}, check=True)
    assert not list(tmp_path.rglob("*"))
