"""Models by their names on the hub, fetched from and pushed to a server that speaks its protocol."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id

from diffquant.checkpoints.hub import check_pushable, fetch_to_local_path
from diffquant.checkpoints.source import open_source
from diffquant.errors import UsageError
from tests.support import tiny_lm
from tests.support.hub import TOKEN, serving
from tests.support.tables import in_one_test
from tests.support.thorough import sampled, thorough

MODEL = "someone/tiny-diff"
CARD = b"""---
license: cc-by-nc-4.0
language: [en, de]
pipeline_tag: text-generation
base_model: another/origin
base_model_relation: finetune
library_name: other
tags: [gguf]
---
# A model for research
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_lm.write_diff_v2(tmp_path_factory.mktemp("hub") / "model")


@pytest.fixture
def hub(folder, tmp_path, monkeypatch):
    """A hub with the model, its newer revision, and files that nobody here reads."""
    with serving() as hub:
        files = {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "README.md"}
        files["README.md"] = CARD
        unread = {"pytorch_model.bin": b"pickle", "consolidated.safetensors": b"again", "onnx/config.json": b"{}"}
        other = json.dumps(json.loads(files["config.json"]) | {"rms_norm_eps": 1e-3}).encode()
        hub.models[MODEL] = {"main": files | unread, "v2": files | {"config.json": other}}
        for name in ("HF_ENDPOINT", "HF_HUB_CACHE", "HF_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        yield hub


@pytest.fixture
def run(hub, tmp_path):
    """Run a command line, or other Python, in a process whose hub is the server: exit code, stdout, stderr."""

    def call(*arguments, start=("-m", "diffquant"), **environment):
        settings = {
            "HF_ENDPOINT": hub.address,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "PYTHONPATH": os.getcwd(),
        }
        command = [sys.executable, *start, *map(str, arguments)]
        environment = {**os.environ, **settings, **environment}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    return call


def test_a_model_of_the_hub_is_quantized_by_its_name_and_what_it_needs_is_fetched_once(run, hub, folder, tmp_path):
    code, _, err = run("quantize", MODEL, "-o", "low", "--weights", "8:row")
    assert (code, err) == (0, "note: rounding by mse; --effort balanced is more accurate and reads a text\n")
    assert open_source(tmp_path / "low").tokenizer is not None
    assert "# tiny-diff, quantized" in (tmp_path / "low/README.md").read_text()
    fetched = {request.rpartition("/")[2] for request in hub.requests if re.match("GET .*/resolve/", request)}
    assert fetched == {file.name for file in folder.iterdir()} | {"README.md"}
    assert ModelCard.load(tmp_path / "low/README.md").data.to_dict() == {
        "library_name": "transformers",
        "license": "cc-by-nc-4.0",
        "language": ["en", "de"],
        "pipeline_tag": "text-generation",
        "base_model": MODEL,
        "base_model_relation": "quantized",
        "tags": ["diffquant", "differential-transformer", "compressed-tensors"],
    }
    hub.requests.clear()
    assert run("inspect", MODEL)[0] == 0
    assert not [request for request in hub.requests if re.match("GET .*/resolve/", request)]


@thorough
def test_a_revision_is_named_behind_the_name(run):
    code, out, _ = run("inspect", f"{MODEL}@v2", "--json")
    assert code == 0
    assert run("inspect", f"{MODEL}@v2", "--json")[1] == out
    assert run("inspect", f"{MODEL}@v3")[::2] == (1, f"error: {MODEL} on the hub has no revision 'v3'\n")


@thorough
def test_transformers_opens_a_revision_of_a_model_of_the_hub(run):
    code = f"""
import diffquant
from transformers import AutoModelForCausalLM
print(AutoModelForCausalLM.from_pretrained({MODEL!r}, revision="v2").config.rms_norm_eps)
"""
    status, out, err = run(start=("-c", code))
    assert status == 0, err
    assert out == "0.001\n"


@pytest.mark.parametrize(
    ("model", "environment", "message"),
    sampled(
        [
            ("someone/nothing", {}, "someone/nothing is neither a local folder or .gguf file nor on the hub"),
            ("someone/gated", {}, "someone/gated is gated: accept its terms on the hub"),
            (MODEL, {"HF_HUB_OFFLINE": "1"}, "the hub cannot be reached"),
            (MODEL, {"HF_ENDPOINT": "http://127.0.0.1:9"}, "the hub cannot be reached"),
        ],
        2,
    ),
    ids=["unknown", "gated", "offline", "unreachable"],
)
def test_what_the_hub_does_not_give_is_one_line(run, hub, model, environment, message):
    hub.gated.add("someone/gated")
    code, out, err = run("inspect", model, **environment)
    assert (code, out) == (1, "")
    assert message in err
    assert len(err.splitlines()) == 1


@thorough
def test_a_path_goes_before_the_hub_and_a_folder_that_is_there_is_not_looked_up(run, hub, folder, tmp_path):
    place = tmp_path / MODEL
    place.parent.mkdir()
    place.symlink_to(folder)
    assert run("inspect", MODEL)[0] == 0
    assert "neither a checkpoint folder" in run("inspect", "someone/tiny")[2]
    assert not hub.requests


def test_a_quantized_folder_is_pushed_with_its_card(run, hub, folder, tmp_path):
    source = tmp_path / "model"
    shutil.copytree(folder, source)
    (source / "README.md").write_bytes(CARD)
    former = dict.fromkeys(("model-00001-of-00002.safetensors", "model.safetensors.index.json"), b"former")
    hub.models["tester/low"] = {"main": former | {"notes.md": b"kept"}}
    code, _, err = run("quantize", source, "-o", "low", "--weights", "8:row", "--push", "tester/low", HF_TOKEN=TOKEN)
    assert code == 0, err
    told, done = err.index("publishing to tester/low"), err.index("pushed to")
    assert told < done
    assert "licence cc-by-nc-4.0, base model another/origin" in err[told:done]
    assert "model.safetensors" in err[told:done]
    assert f"{hub.address}/tester/low" in err
    written = {str(file.relative_to(tmp_path / "low")): file.read_bytes() for file in (tmp_path / "low").iterdir()}
    pushed = hub.models["tester/low"]["main"]
    assert pushed == written | {"notes.md": b"kept"}  # of former shards and their index nothing is left
    assert b"# model, quantized" in pushed["README.md"]


@thorough
def test_an_exported_folder_is_pushed_with_a_card(run, hub, folder):
    code, _, err = run("export", folder, "-o", "onnx", "--push", "tester/onnx", HF_TOKEN=TOKEN)
    assert code == 0, err
    pushed = hub.models["tester/onnx"]["main"]
    assert {"model.onnx", "README.md", "config.json"} <= pushed.keys()
    assert b"library_name: onnx" in pushed["README.md"]


@pytest.mark.parametrize(
    ("name", "token", "message"),
    sampled([("tester/low", "", "log in"), ("low", TOKEN, "expected ORG/NAME"), ("tester/low", "wrong", "refuses")], 3),
)
def test_what_cannot_be_pushed_is_said_before_the_work(run, hub, folder, tmp_path, name, token, message):
    code, _, err = run("quantize", folder, "-o", "low", "--weights", "8:row", "--push", name, HF_TOKEN=token)
    assert code in (1, 2)
    assert message in err
    assert not (tmp_path / "low").exists()


@in_one_test("name", ["model", "a/b/c", ".hidden/model", "a/b--c", "a/b..c", "a/b-", "a/b.git", "a/-b", "é/b"])
def test_a_name_that_the_hub_cannot_have_is_refused_before_it_is_asked(name):
    with pytest.raises(UsageError, match="expected ORG/NAME"):
        check_pushable(name)
    assert fetch_to_local_path(Path(name)) == Path(name)


@in_one_test("name", ["a/b", "a.b-c/d_e-f.1", "a/b@v1--2", "a/" + "b" * 96])
def test_a_name_that_the_hub_can_have_is_asked_for(tmp_path, monkeypatch, name):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda model, **_: validate_repo_id(model) or tmp_path)
    assert fetch_to_local_path(Path(name)) == tmp_path
