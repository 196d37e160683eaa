"""The command line as a user meets it: output, exit codes, one clear line for what went wrong."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from diffquant.errors import MissingDependencyError
from diffquant.kernels.gpu import KernelSurvey
from diffquant.quantization import quantize as quantizing
from diffquant.quantization.plan import plan_quantization
from tests.support.checkpoints import write_diffllama
from tests.support.tables import in_one_test
from tests.support.thorough import sampled


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_diffllama(tmp_path_factory.mktemp("tiny") / "diffllama", num_hidden_layers=2, num_key_value_heads=4)


@pytest.mark.parametrize("start", [["-m", "diffquant"], ["-c", "from diffquant.verbs.cli import main; main()"]])
def test_the_version_is_the_packages(start):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    shown = subprocess.run([sys.executable, *start, "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout == f"diffquant {project['version']}\n"


def test_quantize_then_inspect_tells_what_was_made(run, checkpoint, tmp_path):
    code, out, err = run(
        "quantize", checkpoint, "-o", tmp_path / "low", "--weights", "4:g32", "--kv", "8", "--logits", "6"
    )
    assert code == 0
    assert "has no tokenizer" in err
    code, out, _ = run("inspect", tmp_path / "low", "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["generation"], found["packed"]) == ("DIFF V1", 14)
    assert found["recipe"]["weights"] == "4:g32"
    assert found["recipe"]["logits"] == "6:row"
    assert len(found["lam"]) == 2


@in_one_test(
    ("options", "rounding"),
    [
        ([], {"name": "gptq", "tokens": 64}),
        (["--tokens", "32"], {"name": "gptq", "tokens": 32}),
        (["--rounding", "mse"], "mse"),
    ],
)
def test_the_command_line_goes_before_the_recipes_rounding(run, checkpoint, tmp_path, monkeypatch, options, rounding):
    (tmp_path / "recipe.yaml").write_text("weights: 4:g32\nrounding: {name: gptq, tokens: 64}\n")
    seen = []
    monkeypatch.setattr(
        quantizing,
        "plan_quantization",
        lambda source, recipe, dtype: seen.append(recipe) or plan_quantization(source, recipe, dtype),
    )
    run("quantize", checkpoint, "-o", tmp_path / "low", "--recipe", tmp_path / "recipe.yaml", *options, "--dry-run")
    assert [recipe.to_dict()["rounding"] for recipe in seen] == [rounding]


def test_dry_run_prints_the_table_and_writes_nothing(run, checkpoint, tmp_path):
    code, out, _ = run("quantize", checkpoint, "-o", tmp_path / "low", "--weights", "6", "--dry-run")
    assert code == 0
    assert "6:g32" in out
    assert "total" in out
    assert not list(tmp_path.iterdir())


@in_one_test(
    ("arguments", "code", "message"),
    [
        (["quantize", "SRC", "-o", "OUT", "--kv", "16"], 2, "nothing to quantize"),
        (["quantize", "SRC", "-o", "OUT", "--weights", "4:gg"], 2, "did you mean 'g32'"),
        (["quantize", "SRC", "-o", "OUT", "--weights", "8:row", "--dry-run", "--json"], 2, "prints text, not JSON"),
        (["quantize", "SRC", "-o", "OUT", "--weights", "4:g48"], 1, "group size 48 does not divide"),
        (["quantize", "SRC", "-o", "SRC", "--weights", "4"], 2, "overlaps the input"),
        (["quantize", "nowhere", "-o", "OUT", "--weights", "4"], 1, "nowhere is neither"),
        (["quantize", "SRC", "-o", "OUT", "--weights", "4", "--text", "EMPTY"], 2, "--rounding gptq"),
        (["quantize", "SRC", "-o", "OUT", "--weights", "4", "--tokens", "64"], 2, "--rounding gptq"),
        (["quantize", "SRC", "-o", "OUT", "--weights", "4", "--rounding", "gtpq"], 2, "did you mean 'gptq'"),
        (["quantize", "nowhere", "-o", "OUT"], 1, "nowhere is neither"),
        (["quantize", "--colour"], 2, "No such option"),
        (["quantize", "SRC", "-o", "OUT", "--bits", "4"], 2, "use --weights BITS:gSIZE"),
        (["quantize", "SRC", "OUT"], 2, "give the output as -o OUTPUT"),
        (["quantize", "SRC", "-o", "OUT", "--weights", "nf4"], 2, "the nearest is --weights 4:g32"),
        (["sweep", "SRC", "-o", "OUT", "--task", "chess"], 2, "if it is a task of lm-eval, give lm-eval:chess"),
        (["quantize", "SRC", "-o", "OUT", "--preset", "int3"], 2, "'--preset': 3-bit weights with 16-bit"),
        (["quantize", "SRC", "-o", "OUT", "--preset", "int3"], 2, "'int3' is not one of"),
        (["sweep", "SRC", "-o", "OUT", "--target", "norms"], 2, "unknown target 'norms'"),
        (["sweep", "SRC", "-o", "OUT", "--bits", "16,x"], 2, "'x' is not a whole number"),
        (["sweep", "SRC", "-o", "OUT", "--bits", "9" * 5000], 2, "is not a whole number below a billion"),
        (["sweep", "SRC", "-o", "OUT", "--task", "needle:" + "9" * 5000], 2, "cannot read task 'needle:999"),
        (["sweep", "SRC", "-o", "OUT", "--device", "x"], 2, "unknown device 'x'"),
        (["sweep", "SRC", "-o", "OUT", "--task", "needle", "--lengths", "1k"], 2, "cannot read --lengths '1k'"),
        (["eval", "SRC", "--task", "perplexity", "--text", "absent.txt"], 2, "cannot read text from absent.txt"),
        (["eval", "SRC", "--items", "EMPTY"], 2, "nothing to score"),
        (["eval", "SRC"], 1, "cannot read a tokenizer"),
        (["convert", "SRC", "-o", "OUT", "--to", "diff-v2"], 2, "cannot convert diffllama to diff-v2 exactly"),
        (["generate", "SRC", "--prompt", "hello"], 1, "cannot read a tokenizer"),
        (["generate", "nowhere", "--prompt", "hello", "--device", "x"], 1, "nowhere is neither"),
        (["generate", "SRC", "--prompt", "hello", "--device", "x"], 2, "unknown device 'x'"),
        (["generate", "nowhere", "--prompt", "hello", "--seed", "-1"], 2, "--seed"),
        (["generate", "SRC", "--prompt", "hello", "--dtype", "int3"], 2, "unknown dtype 'int3'"),
    ],
)
def test_bad_input_gives_one_clear_error_and_its_exit_code(run, checkpoint, tmp_path, arguments, code, message):
    places = {"SRC": checkpoint, "OUT": tmp_path / "out", "EMPTY": tmp_path / "empty"}
    places["EMPTY"].write_text("")
    before = sorted(checkpoint.iterdir())
    got, out, err = run(*[places.get(argument, argument) for argument in arguments])
    assert got == code
    assert message in err
    assert "Traceback" not in err
    assert out == ""
    assert not (tmp_path / "out").exists()
    assert sorted(checkpoint.iterdir()) == before


def test_doctor_names_every_requirement_and_every_extra(run):
    code, out, _ = run("doctor", "--json")
    assert code == 0
    found = json.loads(out)
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert list(found["required"]) == [re.split("[>=]", text)[0] for text in project["dependencies"]]
    assert all(found["required"].values())
    extras = project["optional-dependencies"].keys() - {"test", "docs", "release", "quantizers"}
    assert found["extras"].keys() == extras
    assert list(found["extras"]["onnx-gpu"]) == ["onnx", "onnxruntime-gpu"]
    _, out, _ = run("doctor")
    assert all(f"extra {extra}:" in out for extra in extras)


def test_doctor_names_what_is_of_another_version(run, monkeypatch):
    versions = {"transformers": "4.57.1", "scipy": "0.1"}
    monkeypatch.setattr("diffquant.support.installation.installed_version", lambda package: versions.get(package, "99"))
    code, out, err = run("doctor")
    assert code == MissingDependencyError.exit_code
    assert "a required package is missing, or its version is not supported: pip install" in err
    assert re.search(r"transformers 4\.57\.1 \(NOT >=5\S+\)", out)
    assert re.search(r"extra search: scipy 0\.1 \(NOT >=\S+\)\n", out + "\n")
    del versions["transformers"]
    assert run("doctor")[0] == 0


def test_doctor_says_what_the_kernels_make_of_the_device(run, monkeypatch):
    assert "CUDA kernels: torch finds no CUDA device" in run("doctor")[1]
    ampere = KernelSurvey("8.6", 101_376, "3.6", "sm_80", None, {"attention triton-fp8": "it needs Ada"})
    monkeypatch.setattr(sys.modules["diffquant.verbs.doctor"], "_cuda_kernels", lambda: ampere)
    _, out, _ = run("doctor")
    assert "CUDA kernels: capability 8.6, 101,376 bytes of shared memory per block, Triton 3.6" in out
    assert "  not attention triton-fp8: it needs Ada" in out
    _, out, _ = run("doctor", "--json")
    assert json.loads(out)["cuda_kernels"]["shared_memory"] == 101_376


@pytest.mark.parametrize("name", sampled(["SIGINT", "SIGTERM", "SIGHUP"], 3))
def test_ctrl_c_and_what_schedulers_send_exit_with_130(checkpoint, tmp_path, name):
    code = f"""
import signal, sys
import diffquant.quantization.quantize as verb
# A process in a shell's background starts with the signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
verb.plan_quantization = lambda *_: signal.raise_signal(signal.{name})
from diffquant.verbs.cli import main
sys.argv = ["diffquant", "quantize", {str(checkpoint)!r}, "-o", {str(tmp_path / "out")!r}, "--weights", "4"]
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 130
    assert "interrupted" in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_error_that_nobody_foresaw_is_a_line_and_a_traceback_in_a_file(run, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("diffquant.quantization.quantize.write_shards", lambda *_: {}["lost"])
    code, _, error = run("quantize", str(checkpoint), "-o", str(tmp_path / "out"), "--weights", "8")
    assert code == 1
    assert "error: KeyError: 'lost'" in error
    assert "this is a bug in diffquant" in error
    (trace,) = tmp_path.glob("diffquant-*.txt")
    assert str(trace) in error
    assert "Traceback" in trace.read_text()
    assert [entry for entry in tmp_path.iterdir() if entry.name.startswith(("out", ".out"))] == []


def test_memory_that_torch_does_not_get_is_no_bug_in_diffquant(run, checkpoint, tmp_path, monkeypatch):
    def more_than_there_is(*_):
        torch.empty(1 << 50, dtype=torch.uint8)

    monkeypatch.setattr("diffquant.quantization.quantize.write_shards", more_than_there_is)
    code, _, error = run("quantize", str(checkpoint), "-o", str(tmp_path / "out"), "--weights", "8")
    assert code == 1
    assert error.strip().splitlines()[-1].startswith("error: out of memory; no output was written.")
    assert "bug in diffquant" not in error
