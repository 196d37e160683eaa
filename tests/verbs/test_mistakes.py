"""Mistakes of a first hour: each hears what is wrong and what to give, and leaves what was there as it was."""

import os
import subprocess
import sys

import pytest
import torch

import diffquant
from diffquant import data
from diffquant.checkpoints.opening import open_checkpoint
from diffquant.errors import CheckpointError, DiffQuantError, OutputExistsError, UsageError
from diffquant.measure.sweep.outputs import sweep_files
from diffquant.onnx.files import check_exported
from diffquant.support.machine import limit_spinning
from tests.support.checkpoints import write_diffllama
from tests.support.tables import in_one_test
from tests.support.thorough import thorough


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_diffllama(tmp_path_factory.mktemp("tiny") / "diffllama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def pocket():
    return data.pocket_models("needle")[0]


@in_one_test(
    ("given", "hint"),
    [
        ("model.safetensors", "give its folder, .*diffllama$"),
        ("config.json", "give its folder, .*diffllama$"),
        ("../diffllana", "did you mean .*diffllama"),
    ],
)
def test_a_path_beside_the_checkpoint_hears_of_the_checkpoint(checkpoint, given, hint):
    with pytest.raises(CheckpointError, match=hint):
        open_checkpoint(checkpoint / given)


@in_one_test("address", ["https://huggingface.co/org/name", "https://huggingface.co/org/name/tree/main"])
def test_an_address_of_the_hub_hears_the_name(address):
    with pytest.raises(CheckpointError, match=r"as ORG/NAME: org/name$"):
        diffquant.load(address)


def test_a_folder_around_the_checkpoint_hears_where_it_is(checkpoint, tmp_path):
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(checkpoint, target_is_directory=True)
    with pytest.raises(CheckpointError, match=f"has no config.json; give {snapshot}, inside it"):
        open_checkpoint(tmp_path / "models--org--name")
    (tmp_path / "some.gguf").touch()
    with pytest.raises(CheckpointError, match=f"give {tmp_path / 'some.gguf'}, "):
        open_checkpoint(tmp_path)
    (tmp_path / "other.gguf").touch()
    with pytest.raises(CheckpointError, match=r"give one of .*other\.gguf, .*some\.gguf"):
        open_checkpoint(tmp_path)


def test_a_pointer_of_git_lfs_is_no_damage(checkpoint, tmp_path):
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a pointer of Git LFS.*`git lfs pull`"):
        open_checkpoint(tmp_path)


def test_what_is_no_export_hears_what_it_is(checkpoint, tmp_path):
    (tmp_path / "model.onnx").touch()
    for path, hint in {
        checkpoint: "is a checkpoint, not an export: `diffquant export` makes one from it",
        tmp_path / "model.onnx": f"give the folder that it is in, {tmp_path}$",
        tmp_path / "some.gguf": "there is no .*some.gguf",
    }.items():
        with pytest.raises(CheckpointError, match=hint):
            check_exported(path)
    check_exported(tmp_path)


def test_models_are_compared_by_fidelity(checkpoint):
    with pytest.raises(UsageError, match=r"is a model: .*`diffquant fidelity` compares"):
        diffquant.compare(checkpoint, checkpoint)


def test_no_run_goes_into_a_models_folder(checkpoint):
    before = sorted(checkpoint.iterdir())
    with pytest.raises(OutputExistsError, match="is a model's folder; choose another output"):
        sweep_files().check(checkpoint)
    assert sorted(checkpoint.iterdir()) == before


@in_one_test(
    ("content", "hint"),
    [
        (b"\xff\xfe", "config.json is not UTF-8 text"),
        (b"", "config.json is empty; download it again"),
        (b'{"model_type": "diffllama", "num_hidden_layers": -2}', "bad: config.json lacks a positive"),
    ],
)
def test_a_damaged_config_is_named(tmp_path, content, hint):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/config.json").write_bytes(content)
    (tmp_path / "bad/model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    with pytest.raises(CheckpointError, match=hint):
        diffquant.inspect(tmp_path / "bad")


@in_one_test(
    ("content", "hint"),
    [
        (None, "there is no recipe .*recipe.yaml$"),
        (b"\xff\xfe\x80", "recipe.yaml is not UTF-8 text$"),
        (b"kv: 8\nweights: [4", r"cannot read recipe .*recipe.yaml: line 2: expected ',' or '\]'[^\n]*$"),
    ],
)
def test_a_recipe_that_is_none_is_named_in_one_line(checkpoint, tmp_path, content, hint):
    if content is not None:
        (tmp_path / "recipe.yaml").write_bytes(content)
    with pytest.raises(UsageError, match=hint):
        diffquant.quantize(checkpoint, tmp_path / "out", tmp_path / "recipe.yaml")


def test_a_text_that_is_missing_is_told_before_the_work(checkpoint, tmp_path, caplog):
    caplog.set_level("INFO")
    with pytest.raises(UsageError, match=r"cannot read text from .*absent\.txt: No such file"):
        diffquant.quantize(
            checkpoint, tmp_path / "out", {"weights": "4:g16"}, rounding="gptq", text=tmp_path / "absent.txt"
        )
    assert "about" not in caplog.text
    assert not list(tmp_path.iterdir())


@in_one_test("overwrite", [False, True])
def test_a_file_in_the_outputs_place_is_never_offered_to_be_overwritten(checkpoint, tmp_path, overwrite):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(OutputExistsError, match=r"is not a folder, so it is not overwritten; choose another output$"):
        diffquant.quantize(checkpoint, tmp_path / "out", {"weights": "4:g16"}, overwrite=overwrite)
    assert (tmp_path / "out").read_text() == "mine"


@in_one_test("memory", ["24", 24, "lots", "-3G", "0", "24 Q", "24KG"])
def test_a_memory_without_its_unit_is_no_number_of_bytes(checkpoint, memory):
    with pytest.raises(UsageError, match="takes a size such as 24G"):
        diffquant.plan(checkpoint, memory=memory)


@in_one_test(("scheme", "hint"), [("4g32", "did you mean 4:g32"), ("awq", "awq is a rounding, not a format")])
def test_names_of_other_tools_hear_ours(scheme, hint):
    with pytest.raises(UsageError, match=hint):
        diffquant.Scheme.parse(scheme)


def test_a_text_ends_where_the_context_does(pocket):
    model, tokenizer = diffquant.load(pocket), diffquant.load_tokenizer(pocket)
    context = model.config.max_position_embeddings
    prompt = "the " * (context - 2)
    room = context - len(tokenizer(prompt)["input_ids"])
    added = diffquant.generate(model, prompt, tokenizer=tokenizer, max_new_tokens=1000)
    # The tokenizer begins each text with a token of its own.
    assert len(tokenizer(added)["input_ids"]) - 1 == room == 1
    with pytest.raises(UsageError, match=f"the model's context ends at {context}"):
        diffquant.generate(model, "the " * context, tokenizer=tokenizer)


# Arguments of a wrong type or out of bounds, verb by verb, and what each has to hear.
WRONG = [
    ("inspect", (5,), {}, "model is 5; it must be a checkpoint folder"),
    ("inspect", (None,), {}, "model is None; it must be a checkpoint folder"),
    ("export", (torch.nn.Linear(2, 2), "out"), {}, "export reads a checkpoint from disk, not a Linear in memory"),
    ("sweep", ("SRC", "out"), {"bits": 4.5}, "bits is 4.5; it must be text or a list"),
    ("sweep", ("SRC", "out"), {"tasks": 5}, "tasks is 5; it must be text or a list"),
    ("sweep", (5, "out"), {}, "models is 5"),
    ("sweep", ("SRC", "out"), {"limit": "ten"}, "limit takes a number, not 'ten'"),
    ("sweep", (["SRC", 5], "out"), {}, "models is 5"),
    ("evaluate", (torch.nn.Linear(2, 2),), {}, "from disk, not a Linear in memory"),
    ("quantize", ("SRC", 5), {"recipe": 8}, "output is 5; it must be a path"),
    ("quantize", ("SRC", "out"), {"weights": 8}, "quantize takes weights only in the recipe: recipe={'weights': 8}"),
    ("evaluate", ("SRC",), {"kv": 8}, "evaluate takes kv only in the recipe: recipe={'kv': 8}"),
    ("quantize", ("SRC", "out"), {"recipe": 8, "text": 5}, "text is 5; it must be a path"),
    ("quantize", ("SRC", "out"), {"recipe": 8, "tokens": True}, "tokens is True; it must be a whole number"),
    ("generate", ("SRC", 5), {}, "prompt is 5; it must be text$"),
    ("generate", ("SRC", ["hi"]), {}, r"prompt is \['hi'\]; it must be text$"),
    ("generate", ("SRC", "hi"), {"max_new_tokens": 0}, "max_new_tokens must be 1 or more, got 0"),
    ("generate", ("SRC", "hi"), {"max_new_tokens": "x"}, "max_new_tokens is 'x'; it must be a whole number"),
    ("generate", ("SRC", "hi"), {"temperature": -1}, "temperature must be 0 or more, got -1"),
    ("generate", ("SRC", "hi"), {"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
    ("load", ("SRC",), {"dtype": torch.int8}, "a model cannot run in torch.int8"),
    ("load", ("SRC",), {"dtype": "bf16"}, "unknown dtype 'bf16'"),
    ("bench", ("linaer", "out"), {}, "unknown section 'linaer'; choose from"),
    ("bench", ("decode", "out"), {"peer": "DIFF, sdpb"}, "unknown peer 'DIFF, sdpb'; choose"),
    ("verify", ("out",), {}, "verify: missing a required argument: 'model'"),
    ("verify", ("out", "SRC"), {"tolerance": "low"}, "tolerance is 'low'; it must be a number"),
    ("run", ("out", "hi"), {"max_new_tokens": -1}, "max_new_tokens must be 1 or more"),
    ("plan", ("SRC",), {"context": 0}, "context must be 1 or more"),
    ("plan", ("SRC",), {"batch": "x"}, "batch is 'x'; it must be a whole number"),
    ("report", (5,), {}, "runs is 5; it must be a path"),
    ("fidelity", ("SRC", "SRC"), {"characters": -5}, "characters must be 0 or more"),
]


@in_one_test(("verb", "arguments", "named", "message"), WRONG)
def test_wrong_arguments_hear_what_is_taken(checkpoint, tmp_path, monkeypatch, verb, arguments, named, message):
    monkeypatch.chdir(tmp_path)
    places = {"SRC": checkpoint, "out": tmp_path / "out"}
    arguments = [[places.get(x, x) for x in each] if isinstance(each, list) else each for each in arguments]
    arguments = [places.get(each, each) if isinstance(each, str) else each for each in arguments]
    with pytest.raises(UsageError, match=message):
        getattr(diffquant, verb)(*arguments, **named)
    assert not list(tmp_path.iterdir())


@in_one_test("given", [5, None, ["a", "b"]])
def test_load_of_what_is_no_path_says_so(given):
    with pytest.raises(DiffQuantError, match=r"a model is a folder, a \.gguf file or ORG/NAME"):
        diffquant.load(given)


@in_one_test(
    ("said", "expected"), [({}, "10000"), ({"OMP_WAIT_POLICY": "active"}, None), ({"GOMP_SPINCOUNT": "7"}, "7")]
)
def test_what_the_environment_says_of_waiting_stands(monkeypatch, said, expected):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    limit_spinning()
    assert os.environ.get("GOMP_SPINCOUNT") == expected


@thorough
@pytest.mark.skipif(sys.platform != "linux", reason="torch has another OpenMP there")
def test_a_commands_threads_wait_briefly(checkpoint):
    environment = {
        name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    }
    command = [sys.executable, "-m", "diffquant", "inspect", str(checkpoint)]
    ran = subprocess.run(
        command, env=environment | {"OMP_DISPLAY_ENV": "verbose"}, capture_output=True, text=True, check=True
    )
    assert "GOMP_SPINCOUNT = '10000'" in ran.stderr
