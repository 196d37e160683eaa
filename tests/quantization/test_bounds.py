"""What other people's files may cost: time that grows with their size, a bounded amount of memory, and no waiting."""

import json
import lzma
import os
import re
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import diffquant
from diffquant.checkpoints.compressed_targets import match_modules, pick_targets
from diffquant.checkpoints.opening import open_checkpoint
from diffquant.checkpoints.ranges import read_any_ranges
from diffquant.checkpoints.texts import load_text
from diffquant.checkpoints.tokenizer import load_tokenizer
from diffquant.checkpoints.weight_layout import find_transposed
from diffquant.checkpoints.weight_source import PackingRules
from diffquant.errors import CheckpointError, DiffQuantError, UsageError
from diffquant.measure.cells import Cell
from diffquant.measure.comparison import read_samples
from diffquant.measure.protocols.hellaswag import load_items
from diffquant.measure.results import TaskResult
from diffquant.measure.sweep.result import model_names
from diffquant.recipe import Recipe
from diffquant.support import files, plain_data
from diffquant.support.outputs import Journal
from diffquant.support.plain_data import match_names, parse_json
from diffquant.support.yaml_text import parse_yaml
from diffquant.verbs.recipes import recipe_from_options
from examples.shots.labelled import load_dataset
from tests.support import tiny_lm
from tests.support.checkpoints import edit_json, write_llama
from tests.support.packed_folders import write_packed
from tests.support.tables import in_one_test

posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
DOUBLED = "{" + ",".join(f'"k{i}":0' for i in range(100_000)) + ',"k0":1}'
NAMES = [
    f"model.layers.{layer}.{module}"
    for layer in (0, 1, 9, 10, 11, 21)
    for module in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.experts.3.up_proj", "moe.gate")
] + ["lm_head", "model.embed_tokens", "vision_tower.layers.0.qkv", "λ.x\ny"]
# As published folders of compressed-tensors and GPTQModel have them.
PUBLISHED = [
    r".*self_attn\.(q|k|v)_proj$",
    r"model.layers.(1|2)..*",
    r".*lm_head",
    r"vision_tower.*",
    r"^(?!.*(?:self_attn|lm_head)).*$",
    r"model\.layers\.(?:[0-9]|1[0-9])\.(?!self_attn).*",
    r".*\.(?<!experts\.3\.)up_proj",
    r"(?i).*SELF_ATTN\..*",
    r"(?P<a>model)\.(?:layers)\.(\d)\2\..*",
    r".*[-_]gate(?:_proj)?\Z",
    r"model\.layers\.(1|10|11)\.mlp\.gate_proj$",
    r"re:.*",
    "",
]
ENDLESS = [r"(([a-z0-9_.])+)+[!?]", r"(.*)*(.*)*(.*)*(.*)*(.*)*[!?]", r"(?=(?:(?:\w|.)+)+[?!])x", r"(.|.|..)*[?!]"]


@pytest.fixture
def quick():
    """Fail a test that takes as long as a quadratic count of its input."""
    started = time.process_time()
    yield
    assert time.process_time() - started < 20


@pytest.mark.usefixtures("quick")
def test_names_given_twice_are_found_in_linear_time(tmp_path):
    with pytest.raises(ValueError, match="gives 'k0' twice"):
        parse_json(DOUBLED)
    with pytest.raises(ValueError, match="'k0' given twice"):
        parse_yaml("".join(f"k{i}: 0\n" for i in range(20_000)) + "k0: 1\n")
    with pytest.raises(ValueError, match="'k0', 'k1', 'k2', 'k3', 'k4', and 5 more twice"):
        parse_json("{" + ",".join(f'"k{i % 10}":0' for i in range(50_000)) + "}")
    (tmp_path / "config.json").write_text(DOUBLED)
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="'k0' twice"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    raw = (tmp_path / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    doubled = DOUBLED.replace(":0", ':""').replace(":1", ':""')
    header = f'{raw[8 : 8 + size].decode().strip()[:-1]},"__metadata__":{doubled}}}'.encode()
    header += b" " * (-len(header) % 8)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + size :])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.usefixtures("quick")
def test_overrides_given_twice_or_without_a_weight_are_found_in_linear_time(tmp_path):
    model = write_llama(tmp_path / "model")
    doubled = [f"*.k{i}=8" for i in range(50_000)]
    with pytest.raises(UsageError, match=r"'\*\.k0' twice"):
        recipe_from_options(overrides=[*doubled, doubled[0]])
    with pytest.raises(UsageError, match=r"'x0' matches no weight.*and 2995 more"):
        diffquant.quantize(
            model, tmp_path / "out", {"weights": "4:g16", "overrides": {f"x{i}": 8 for i in range(3000)}}
        )


@pytest.mark.usefixtures("quick")
def test_names_of_a_checkpoint_and_of_a_result_are_compared_in_linear_time():
    from diffquant.checkpoints.reader import TensorInfo

    tensors = {f"layers.{i}.c_attn.weight": TensorInfo(torch.float32, (2, 6), "x") for i in range(20_000)}
    tensors |= {f"layers.{i}.c_attn.bias": TensorInfo(torch.float32, (6,), "x") for i in range(20_000)}
    assert len(find_transposed(tensors)) == 20_000
    assert len(set(model_names([Path(f"/a/{i}/model") for i in range(5000)]).values())) == 5000
    targets = {f"model.layers.{i}.q_proj": i for i in range(20_000)} | {"Linear": -1}
    assert pick_targets([*targets, "x"], targets) == targets | {"x": -1}


@in_one_test("expression", PUBLISHED)
def test_expressions_match_as_python_matches_them(expression):
    found = [re.match(expression, name) is not None for name in NAMES]
    assert [index == 0 for index in match_names([expression], NAMES)] == found
    wanted = [next((i for i, each in enumerate(PUBLISHED) if re.match(each, name)), None) for name in NAMES]
    assert match_names(PUBLISHED, NAMES) == wanted


def test_what_diffquant_writes_is_matched_without_another_process(monkeypatch):
    from diffquant.checkpoints.compressed_targets import name_patterns

    monkeypatch.setattr(subprocess, "run", None)
    modules = [f"model.layers.{i}.mlp.experts.{j}.up-proj" for i in range(30) for j in range(40)]
    (pattern,) = name_patterns(modules)
    assert match_names([pattern.removeprefix("re:")], [*modules, "model.layers.30.mlp"]) == [0] * 1200 + [None]


@in_one_test("expression", ENDLESS)
def test_an_expression_that_would_never_end_is_refused(tmp_path, expression):
    started = time.monotonic()
    with pytest.raises(CheckpointError, match="takes too much time or memory"):
        match_modules([expression], ["model.layers.0.self_attn.q_proj" * 4])
    assert time.monotonic() - started < 60
    assert not plain_data._is_plain(expression)


@in_one_test("expression", ["(", "*", "a{99999999999999999999}", "(?z)", "(" * 5000 + ")" * 5000])
def test_what_is_no_expression_is_named(expression):
    with pytest.raises(CheckpointError, match="is not a regular expression"):
        match_modules(["model", expression], NAMES)


def test_the_expressions_of_a_gptq_folder_are_bounded_too(tmp_path):
    write_packed(tmp_path, "gptq", dynamic={"(([a-z0-9_.])+)+[!?]": {"bits": 4}, "+:.*up": {"bits": 4}, "-:(": {}})
    with pytest.raises(CheckpointError, match=r"regular expressions .* takes too much"):
        open_checkpoint(tmp_path)


def bomb(file, start, piece, mebibytes):
    packer = lzma.LZMACompressor(preset=0)
    with file.open("wb") as stream:
        stream.write(packer.compress(start))
        for _ in range(mebibytes):
            stream.write(packer.compress(piece * ((1 << 20) // len(piece))))
        stream.write(packer.flush())


def test_a_compressed_result_that_expands_without_end_is_refused_by_name(tmp_path):
    bomb(tmp_path / "sweep.json.xz", b'{"a":"', b"0", 1 << 10)
    with pytest.raises(ValueError, match=r"sweep\.json\.xz holds more than the limit of 256 MiB"):
        files.read_text_or_xz(tmp_path / "sweep.json")
    # Two streams behind one another are one file.
    (tmp_path / "two.json.xz").write_bytes(lzma.compress(b"[1,") + lzma.compress(b"2]"))
    assert files.read_text_or_xz(tmp_path / "two.json") == "[1,2]"
    (tmp_path / "none.json.xz").write_bytes(b"[1]")
    with pytest.raises(ValueError, match=r"none\.json\.xz is damaged"):
        files.read_text_or_xz(tmp_path / "none.json")


@in_one_test("text", ["[" * 100_000, "[]", '{"cells": {}}', '{"cells": [1]}', '{"cells": [], "cells": []}'])
def test_a_result_of_another_form_is_one_error(tmp_path, text):
    (tmp_path / "sweep.json").write_text(text)
    for read in (lambda: diffquant.report(tmp_path), lambda: diffquant.compare(tmp_path, tmp_path)):
        with pytest.raises(UsageError):
            read()


def pipe(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def device(path):
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def unix_socket(path):
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(path.parent)
        server.bind(path.name)


def link_to_itself(path):
    path.symlink_to(path)


FILES = [*(f"{name}.json" for name in ("config", "tokenizer", "tokenizer_config", "generation_config"))]
FILES += ["model.safetensors", "README.md"]
SPECIAL = {"pipe": pipe, "device": device, "socket": unix_socket}
READERS = {
    "recipe": Recipe.read,
    "text": load_text,
    "items": load_items,
    "labels": lambda file: load_dataset(file, file),
    "samples": read_samples,
    "ranges": read_any_ranges,
    "weight rules": PackingRules.read,
    "GGUF": open_checkpoint,
    "sweep": lambda file: diffquant.compare(file, file),
    "base file": lambda file: diffquant.fidelity(file, file),
}


@posix
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_plain_file_is_refused_at_once(tmp_path, monkeypatch, kind, reader):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / {"GGUF": "x.gguf", "samples": "x.jsonl", "labels": "x.csv"}.get(reader, "x.yaml")
    SPECIAL[kind](file)
    with pytest.raises(DiffQuantError, match="x\\."):
        READERS[reader](file)


@posix
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", FILES)
def test_a_checkpoint_with_a_pipe_or_device_is_refused_by_its_name(tmp_path, monkeypatch, kind, name):
    monkeypatch.chdir(tmp_path)
    folder = tiny_lm.write_llama(tmp_path / "m")
    SPECIAL[kind](folder / name)
    for use in (open_checkpoint, load_tokenizer, diffquant.inspect, lambda path: diffquant.quantize(path, "q", 8)):
        with pytest.raises(CheckpointError, match=re.escape(name)):
            use(folder)


@posix
@in_one_test("place", ["a looping link", "a dangling link", "a folder"])
def test_a_config_that_leads_nowhere_is_named(tmp_path, place):
    folder = write_llama(tmp_path / "m")
    (folder / "config.json").unlink()
    if place == "a folder":
        (folder / "config.json").mkdir()
    else:
        (folder / "config.json").symlink_to("config.json" if "loop" in place else "absent")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(folder)


def test_a_config_of_a_size_that_none_has_is_refused_unread(tmp_path):
    folder = write_llama(tmp_path / "m")
    with (folder / "config.json").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match=r"config\.json has 1099511627776 bytes"):
        open_checkpoint(folder)


@posix
def test_what_a_shell_opened_is_read(tmp_path):
    (tmp_path / "x.txt").write_text("some prose")
    reading, writing = os.pipe()
    os.write(writing, b"weights: 4:g32\n")
    os.close(writing)
    assert Recipe.read(Path(f"/dev/fd/{reading}")).weights.bits == 4
    os.close(reading)
    code = (
        "from pathlib import Path; from diffquant.checkpoints.texts import load_text; "
        "print(load_text(Path('/dev/stdin')))"
    )
    ran = subprocess.run([sys.executable, "-c", code], input="piped prose", capture_output=True, text=True)
    assert ran.stdout == "piped prose\n"


@posix
def test_a_folder_pipe_or_loop_in_the_place_of_a_journal_is_in_nobodys_way(tmp_path):
    for put in (Path.mkdir, os.mkfifo, link_to_itself):
        folder = tmp_path / put.__name__
        folder.mkdir()
        journal = Journal(folder, {"a": 1})
        put(journal.path)
        Journal(folder, {"a": 1}).add("x", 1.5)
        assert Journal(folder, {"a": 1}).get("x") == 1.5


BYTES = os.fsdecode(b"m\xff")


@posix
def test_a_path_that_is_no_utf_8_is_named_before_the_work(tmp_path):
    folder = write_llama(tmp_path / "m")
    folder.rename(tmp_path / BYTES)
    for use in (open_checkpoint, diffquant.load, diffquant.inspect):
        with pytest.raises(DiffQuantError, match="not UTF-8"):
            use(tmp_path / BYTES)
    (tmp_path / BYTES).rename(folder)
    with pytest.raises(UsageError, match=r"output is .* not UTF-8"):
        diffquant.quantize(folder, tmp_path / BYTES, 8)
    with pytest.raises(UsageError, match=r"text is .* not UTF-8"):
        diffquant.evaluate(folder, "perplexity", text=tmp_path / BYTES)


def test_a_shard_whose_name_is_half_a_character_is_named(tmp_path):
    folder = write_llama(tmp_path / "m", shard_size="20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    first = next(iter(index["weight_map"]))
    edit_json(folder / "model.safetensors.index.json", weight_map=index["weight_map"] | {first: "x\udcff.safetensors"})
    with pytest.raises(CheckpointError, match="is missing"):
        open_checkpoint(folder)


@in_one_test(
    "make",
    [
        lambda: diffquant.Scheme(4, "tensor"),
        lambda: diffquant.Scheme(diffquant.Scheme.parse("4:g32").format, "g32"),
        lambda: type(diffquant.Scheme.parse("4:g32").sharing)(4),
        lambda: Recipe(logits=4),
        lambda: Recipe(overrides=["*=4"]),
        lambda: Recipe(rounding="mse"),
        lambda: Recipe.of(rounding=4),
        lambda: type(Recipe().rounding)("gptq", text="x.txt"),
    ],
)
def test_a_public_constructor_given_text_says_what_reads_text(make):
    with pytest.raises(UsageError) as refused:
        make()
    assert "Attribute" not in str(refused.value)


@posix
@in_one_test("put", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path)])
def test_a_cell_in_whose_place_something_else_lies_is_measured_again(tmp_path, put):
    cell = Cell(None, "nll", key={"model": "x"}, folder=tmp_path)
    put(cell.path)
    put(cell.failure_path)
    assert cell.read() is None
    assert cell.read_failure() is None
    cell.write_failure("no memory")
    assert cell.read_failure() == "no memory"
    cell.failure_path.unlink()
    put(cell.failure_path)
    cell.write(TaskResult(metric="nll", score=1.0, n=1, seconds=1.0, weight_bytes=1, kv_bytes=1.0))
    assert cell.read().score == 1.0
    assert not os.path.lexists(cell.failure_path)
