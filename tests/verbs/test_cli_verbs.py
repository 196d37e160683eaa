"""Verbs in the help, options that mean the same everywhere, presets, and what a terminal shows while torch loads."""

import json
import os
import pty
import re
import shlex
import subprocess
import sys

import pytest
import typer

from diffquant.errors import UsageError
from diffquant.recipe import Recipe
from diffquant.recipe.presets import PRESETS
from diffquant.recipe.scheme import Scheme
from diffquant.support.names import split_numbers
from diffquant.verbs import GROUPS
from diffquant.verbs.cli import app
from diffquant.verbs.export import _cache_bits
from diffquant.verbs.recipes import recipe_from_options
from tests.support import tiny_lm
from tests.support.checkpoints import write_checkpoint
from tests.support.tables import in_one_test

COMMANDS = typer.main.get_command(app).commands


@in_one_test("name", COMMANDS)
def test_a_verb_is_a_whole_sentence_in_60_characters_and_ends_with_an_example_that_parses(name, run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    sentence = COMMANDS[name].help.partition("\n")[0]
    assert re.fullmatch(r"[A-Z][^.]{10,58}\.", sentence), sentence
    assert sentence in run("--help")[1]
    shown = run(name, "--help")[1]
    verb, *words = shlex.split(re.split(r"Example:\n +diffquant ", shown)[1])
    assert verb == name
    COMMANDS[name].make_context(name, words, resilient_parsing=False)


@in_one_test("name", COMMANDS)
def test_values_are_words_and_no_types_of_python(name, run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = run(name, "--help")[1]
    assert not re.findall(r"\{\w+\}|<(?:str|int|path|float|list)[^>|]*>", shown)
    texts = [option.help or "" for option in COMMANDS[name].params]
    assert not [text for text in texts if not text.endswith(".") or text.startswith(("Of ", "As ", "From "))]


def test_verbs_stand_in_groups(run):
    shown = run("--help")[1]
    headings = re.findall(r"^([A-Z][\w ]+):$", shown, re.MULTILINE)
    assert headings == ["Options", *GROUPS]
    assert len(COMMANDS) == sum(map(len, GROUPS.values()))


def test_an_option_has_one_kind_of_value_in_all_verbs():
    words = {}
    for name, verb in COMMANDS.items():
        for option in verb.params:
            if option.opts[0].startswith("--") and option.opts[0] != "--output":
                words.setdefault(option.opts[0], {})[name] = option.metavar
    # A verb may take a list of what another takes one of, or more sources than files.
    many = {"LIST", "SOURCE"}
    differing = {option: places for option, places in words.items() if len(set(places.values()) - many) > 1}
    assert not differing


@in_one_test(
    ("name", "recipe"),
    [
        ("int4", {"weights": "4:g32"}),
        ("kv-4bit-best", {"k": "4:c32", "v": "4:row:rotated", "residual": 64}),
        ("paper", {"logits": "4:tensor"}),
    ],
)
def test_a_preset_is_a_recipe_of_its_own(name, recipe):
    assert Recipe.parse(recipe_from_options(preset=name)) == Recipe.parse(name) == Recipe.of(**recipe)
    assert all(Recipe.of(**settings) != Recipe() for settings in PRESETS.values())


@in_one_test("name", ["w4a16", "int4", "Q4_K_M"])
def test_a_scheme_by_another_librarys_name_is_explained(name):
    with pytest.raises(UsageError, match="4-bit weights with 16-bit activations are weights='4:g32' here"):
        Scheme.parse(name)


def test_lists_know_k_for_1024():
    assert split_numbers("lengths", "256,1K,4K", "1K") == (256, 1024, 4096)


def test_an_exports_cache_takes_a_scheme_whose_scales_are_calibrated():
    assert [_cache_bits(text) for text in ("16", "8", "8:static", "4:static")] == [16, 8, 8, 4]
    for text in ("8:row", "8:channel"):
        with pytest.raises(UsageError, match="calibrated scales, one per channel; give 8"):
            _cache_bits(text)


def test_a_transformer_where_diff_may_have_been_meant_is_said_in_a_line(run, tmp_path):
    source = write_checkpoint(tmp_path / "llama", "llama")
    code, _, err = run("quantize", source, "-o", tmp_path / "low", "--preset", "int4")
    assert (code, err.splitlines()[0]) == (0, f"note: {source} is a plain Transformer, without differential attention")
    code, _, err = run("convert", source, "-o", tmp_path / "out", "--to", "diffllama")
    assert code == 2
    assert "cannot convert llama, a plain Transformer, to diffllama exactly" in err


def test_what_verbs_make_and_say_comes_as_json(run, tmp_path):
    source = tiny_lm.write_llama(tmp_path / "llama")
    code, out, _ = run("convert", source, "-o", tmp_path / "diff", "--to", "diff-v2", "--json")
    made = json.loads(out)
    assert (code, made["target_type"], made["recipe"]["weights"]) == (0, "diff_v2", "16")
    code, out, _ = run("quantize", source, "-o", tmp_path / "low", "--weights", "4:row", "--json")
    assert (code, json.loads(out)["errors"][0]["scheme"]) == (0, "4:row")
    code, out, _ = run("generate", tmp_path / "diff", "--prompt", "It was", "--max-new-tokens", "2", "--json")
    said = json.loads(out)
    assert (code, said["prompt"], bool(said["text"])) == (0, "It was", True)
    assert run("export", tmp_path / "diff", "-o", tmp_path / "onnx")[0] == 0
    code, out, _ = run("run", tmp_path / "onnx", "--prompt", "It was", "--max-new-tokens", "2", "--json")
    assert (code, json.loads(out)) == (0, said)


@pytest.mark.parametrize("package", ["typer", "torch"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_an_interrupted_import_is_one_line(tmp_path, package, name):
    (tmp_path / package).mkdir()
    kill = f"import os, signal, time\nos.kill(os.getpid(), signal.{name})\ntime.sleep(9)\n"
    (tmp_path / package / "__init__.py").write_text(kill)
    # A shell's background may have left SIGINT ignored, and nohup SIGHUP.
    code = "import signal, runpy; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "signal.signal(signal.SIGHUP, signal.SIG_DFL); "
    code += "runpy.run_module('diffquant', run_name='__main__', alter_sys=True)"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}"}
    done = subprocess.run(
        [sys.executable, "-c", code, "inspect", str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.strip()) == (130, "interrupted")


def test_a_terminal_shows_at_once_that_torch_is_loading(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise SystemExit(7)\n")
    ours, theirs = pty.openpty()
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}"}
    command = [sys.executable, "-m", "diffquant", "inspect", str(tmp_path)]
    with subprocess.Popen(command, env=environment, stderr=theirs, stdout=subprocess.PIPE) as process:
        os.close(theirs)
        assert process.wait() == 7
    assert os.read(ours, 4096).startswith(b"\r\x1b[Kinspect: loading ...")
    os.close(ours)
