"""The pages that a newcomer follows, followed: every command and every program on them, in order."""

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from diffquant.data import pocket_models
from diffquant.quantization.conversion import convert
from diffquant.recipe import Recipe
from diffquant.support.plain_data import parse_json
from diffquant.support.yaml_text import parse_yaml
from diffquant.verbs.cli import app
from tests.docs.commands import ROOT
from tests.support.checkpoints import write_llama
from tests.support.tables import in_one_test
from tests.walk import steps_of


def blocks(page, language):
    """The contents of a page's code blocks in a language."""
    return re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


def commands(page):
    """The command lines of a page's shell blocks."""
    return [line for block in blocks(page, "sh") for line in block.replace("\\\n", "").splitlines()]


def output_of(command):
    """What a `diffquant` command prints."""
    done = CliRunner().invoke(app, shlex.split(command)[1:])
    assert done.exit_code == 0, f"{command}\n{done.output}\n{done.exception!r}"
    return done.stdout


@pytest.fixture
def pocket(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = pocket_models("needle")[0].parent
    monkeypatch.setenv("POCKET", str(folder))
    return folder


def test_the_tutorial_runs_as_written_and_shows_what_it_says(pocket, tmp_path):
    assignment = next(line for line in commands("docs/tutorial.md") if line.startswith("POCKET="))
    program = shlex.split(assignment.removeprefix("POCKET=$(").removesuffix(")"))
    found = subprocess.run([sys.executable, *program[1:]], capture_output=True, text=True, cwd=ROOT, check=True)
    assert Path(found.stdout.strip()) == pocket

    lines = [line for line in commands("docs/tutorial.md") if line.startswith("diffquant ")]
    printed = {line.split()[1]: output_of(line.replace("$POCKET", str(pocket))) for line in lines}
    assert printed["generate"].split() == printed["run"].split() == ["42", "."]
    assert "DIFF V1" in printed["inspect"]
    assert printed["verify"].startswith("PASS: ")

    cells = parse_json((tmp_path / "sweep" / "sweep.json").read_bytes())["cells"]
    assert {(cell["target"], cell["bits"]) for cell in cells} == {
        *(("", 16), *((target, bits) for target in ("weights", "kv", "logits") for bits in (8, 4)))
    }
    assert min(cell["result"]["score"] for cell in cells) > 0.8
    assert "mean KL" in printed["fidelity"]
    assert "retrieved" in printed["eval"]

    (python,) = blocks("docs/tutorial.md", "python")
    variables = {}
    exec(python, variables)
    assert variables["answer"].strip() == "42"


def test_the_readme_runs_as_written_from_top_to_bottom(tmp_path, monkeypatch):
    """With a small Llama in the place of SmolLM2's file and of a reader's own model, and less text."""
    monkeypatch.chdir(tmp_path)
    prose = pocket_models("prose")[0]
    sizes = {"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 2048}
    llama = write_llama(tmp_path / "llama", torch.bfloat16, tie_word_embeddings=True, **sizes)
    for file in prose.glob("tokenizer*"):
        shutil.copy(file, llama)
    convert(llama, tmp_path / "ORG/NAME", "diff-v2")
    page = (ROOT / "README.md").read_text(encoding="utf-8").replace("SmolLM2-135M-Instruct.Q4_1.gguf", "llama")
    steps = [step.command for step in steps_of(page) if step.command.startswith("diffquant ")]
    flow = ["convert", "quantize", "generate", "inspect", "quantize", "fidelity", "export", "verify", "serve"]
    assert [step.split()[1] for step in steps] == flow
    for step in steps:
        if "serve" not in step:
            less = " --tokens 256" if "quantize" in step else ""
            output_of(step.partition("#")[0].replace("8192", "4096") + less)

    (python,) = blocks("README.md", "python")
    exec(python.replace("characters=8192", "characters=2000"), {})
    assert (tmp_path / "results/report.html").is_file()


def test_the_program_for_genai_runs_as_written(pocket):
    pytest.importorskip("onnxruntime_genai")
    exports = [line for line in commands("docs/onnx.md") if line.startswith("diffquant export MODEL")]
    command = next(line for line in exports if "cuda" not in line)
    output_of(command.replace("MODEL", str(pocket / "needle-diff-v1")))
    (python,) = blocks("docs/onnx.md", "python")
    variables = {}
    exec(python, variables)
    assert variables["text"].split()[0] == "42"


@in_one_test("number", range(2))
def test_the_recipes_on_their_page_are_read(number):
    recipe = Recipe.from_dict(parse_yaml(blocks("docs/quantize.md", "yaml")[number]))
    assert str(recipe.weights) == "4:g32"
    assert recipe.rounding.name == "gptq"


def test_the_page_of_recipes_names_every_key():
    table = (ROOT / "docs/quantize.md").read_text(encoding="utf-8").partition("| key | takes |")[2]
    table = table.partition("\n\n")[0]
    named = {
        name for cell in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", cell)
    }
    assert named == {field.name for field in fields(Recipe)}
