"""The evidence script as far as it goes without a GPU: what travels, what each call runs alone, what comes back."""

import gzip
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from typer.main import get_command

from diffquant.data import books_text, hellaswag_lines
from diffquant.quantization.loading import load
from diffquant.verbs.cli import app
from tests.support import tiny_lm
from tests.support.thorough import thorough

ROOT = Path(__file__).parents[3]
SCRIPT = Path("research/bench/gpu/evidence.sh")
CALLS = ("tests", "ratios", "sweep", "pairs")
LIMIT = 64 << 20
# Says what it was asked for, and leaves what the real one would.
PYTHON = """#!/bin/bash
printf '%q ' "$@" >> "$ASKED"; echo >> "$ASKED"
case "$*" in
    *"carried pack"*) mkdir -p "${@: -1}" && cp "${@: -2:1}" "${@: -1}/carried.safetensors" ;;
    *"carried unpack"*) mkdir "${@: -1}" ;;
    *train.pairs*) mkdir -p evidence/pairs/diff-v1
        head -c 40000000 /dev/urandom > evidence/pairs/diff-v1/delta.safetensors
        echo {} > evidence/pairs/results.json; touch evidence/pairs/diff-v1/checkpoint.pt; echo trained ;;
    *sweep*) mkdir -p evidence/sweep; touch evidence/sweep/sweep.json evidence/sweep/table.csv ;;
    *"-m research.bench.gpu"*) [ -z "$FAILING" ] && touch "$OUT/gpu.json" ;;
esac
"""


@pytest.fixture
def machine(tmp_path):
    """A function that runs the script in a folder, with a Python that does nothing, and no GPU."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python3").write_text(PYTHON)
    (programs / "python3").chmod(0o755)
    environment = os.environ | {
        "PATH": f"{programs}:/usr/bin:/bin",
        "ASKED": str(tmp_path / "asked"),
        "OUT": str(tmp_path / "out"),
        "FAILING": "",
    }

    def run(folder, *arguments, **changes):
        command = ["bash", SCRIPT, *map(str, arguments)]
        return subprocess.run(command, cwd=folder, env=environment | changes, capture_output=True, text=True)

    return run


@pytest.fixture
def packed(machine, tmp_path):
    """Archives of a small model."""
    model, items, text = tmp_path / "model.gguf", tmp_path / "items.jsonl.gz", tmp_path / "text.txt"
    model.write_bytes(os.urandom(300_001))
    items.write_bytes(gzip.compress(b"{}"))
    text.write_text("It was a dark and stormy night.\n" * 99)
    done(machine(ROOT, "pack", model, items, text, tmp_path / "packed"))
    (tmp_path / "asked").unlink()
    return tmp_path / "packed"


def done(process):
    assert process.returncode == 0, process.stdout + process.stderr
    return process


def unpacked(archive, folder):
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder


def asked(tmp_path):
    return [shlex.split(line) for line in (tmp_path / "asked").read_text().splitlines()]


@pytest.mark.parametrize("call", CALLS)
def test_a_call_needs_its_archive_alone_and_leaves_raw_results(call, machine, packed, tmp_path):
    assert (packed / f"{call}.tar.gz").stat().st_size <= LIMIT
    there = unpacked(packed / f"{call}.tar.gz", tmp_path / "there")
    done(machine(there, call))
    wanted = {"tests": "gpu-test.txt", "ratios": "gpu.json", "sweep": "sweep.json", "pairs": "pairs.log"}
    left = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert {wanted[call], "device.txt"} <= set(left)
    # As many and as large as come back.
    assert len(left) <= 8
    assert max(left.values()) <= 16 << 20
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    assert f"commit {commit}" in (tmp_path / "out/device.txt").read_text()


def test_what_a_call_asks_of_our_commands_they_take(machine, packed, tmp_path):
    there = unpacked(packed / "sweep.tar.gz", tmp_path / "there")
    done(machine(there, "sweep"))
    seen = [words[2:] for words in asked(tmp_path) if words[:2] == ["-m", "diffquant"]]
    assert [words[0] for words in seen] == ["convert", "sweep"]
    group = get_command(app)
    for verb, *options in seen:
        command = group.get_command(group.make_context("test", [verb, *options]), verb)
        # Raises where an option is missing or unknown.
        command.make_context(verb, list(options))


def test_training_comes_back_in_pieces_without_what_only_resuming_needs(machine, packed, tmp_path):
    there = unpacked(packed / "pairs.tar.gz", tmp_path / "there")
    done(machine(there, "pairs"))
    assert len(list((tmp_path / "out").glob("pairs.tar.*"))) == 3
    done(machine(there, "unpack", tmp_path / "out", tmp_path / "back"))
    name = "pairs/diff-v1/delta.safetensors"
    digests = [hashlib.sha256((at / name).read_bytes()).digest() for at in (there / "evidence", tmp_path / "back")]
    assert digests[0] == digests[1]
    assert not (tmp_path / "back/pairs/diff-v1/checkpoint.pt").exists()


def test_a_model_that_does_not_fit_is_refused_where_it_is_packed(machine, tmp_path):
    large, small = tmp_path / "large.gguf", tmp_path / "small"
    large.write_bytes(os.urandom(LIMIT))
    small.write_bytes(b"some text")
    refused = machine(ROOT, "pack", large, small, small, tmp_path / "packed")
    assert refused.returncode == 1
    assert "sweep.tar.gz is larger than 64 MiB" in refused.stderr
    assert "take a smaller MODEL" in refused.stderr
    assert machine(ROOT, "nonsense").returncode == 2


def test_a_failed_bench_fails_its_call(machine, packed, tmp_path):
    there = unpacked(packed / "ratios.tar.gz", tmp_path / "there")
    assert machine(there, "ratios", FAILING="yes").returncode != 0
    assert "commit" in (tmp_path / "out/device.txt").read_text()


# `pairs` in a few steps of a tiny model: of the settings that ship, those that a large GPU asks for.
SMALL = """
schedule: {warmup: 1, tokens: 128, accumulate: 1, lengths: [[0, 64]], rate: 1.0e-2, decay: 0}
perturbation: 0.05
distil: {diff-v1: 0.5}
delta: 4:g32
heldout: 2000
calibration: 128
every: 1
"""


@pytest.fixture
def here(tmp_path):
    """A function that runs the script with this Python on this processor."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PYTHON": sys.executable, "DEVICE": "cpu", "MINUTES": "1", "OUT": str(tmp_path / "out")}

    def run(folder, *arguments):
        command = ["bash", SCRIPT, *map(str, arguments)]
        return done(subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True))

    return run


@pytest.fixture
def tiny(here, tmp_path):
    """Archives of a tiny model, four items of HellaSwag and some prose."""
    model, items, text = tiny_lm.write_llama(tmp_path / "model"), tmp_path / "items.jsonl.gz", tmp_path / "text.txt"
    items.write_bytes(gzip.compress("\n".join(hellaswag_lines()[:4]).encode()))
    text.write_text(books_text()[:20000])
    here(ROOT, "pack", model, items, text, tmp_path / "packed")
    return tmp_path / "packed"


@thorough
def test_a_sweep_runs_on_what_travelled_alone(here, tiny, tmp_path):
    """With a tiny model on this processor: commands, versions and files are those of the call."""
    here(unpacked(tiny / "sweep.tar.gz", tmp_path / "there"), "sweep")
    # Two models at 16 bits, and at four widths by three granularities.
    assert len((tmp_path / "out/table.csv").read_text().splitlines()) == 1 + 2 * (1 + 4 * 3)
    assert json.loads((tmp_path / "out/sweep.json").read_text())["settings"]["options"]["targets"] == ["logits"]


@thorough
@pytest.mark.timeout(600)
def test_pairs_train_on_what_travelled_alone_and_what_comes_back_makes_the_models(here, tiny, tmp_path):
    there = unpacked(tiny / "pairs.tar.gz", tmp_path / "there")
    (there / "research/train/pairs.yaml").write_text(SMALL)
    here(there, "pairs")
    here(there, "unpack", tmp_path / "out", tmp_path / "back")
    results = json.loads((tmp_path / "back/pairs/results.json").read_text())
    assert results["steps"] == json.loads((tmp_path / "back/pairs/plan.json").read_text())["steps"] > 0
    for kind, model in results["models"].items():
        assert model["trained"]["perplexity"] < model["start"]["perplexity"]
        # The base is what the model's codes of the archive decode to.
        arguments = [
            "apply",
            tmp_path / f"back/pairs/{kind}/delta.safetensors",
            there / "evidence/model",
            tmp_path / kind,
        ]
        done(subprocess.run([sys.executable, "-m", "research.train.pairs", *arguments], cwd=there, capture_output=True))
        assert load(tmp_path / kind).num_parameters() > 0
    # The same call again, where it ended: nothing is trained anew.
    steps = (there / "evidence/pairs/diff-v2/log.jsonl").stat().st_mtime_ns
    shutil.rmtree(there / "evidence/model")
    here(there, "pairs")
    assert (there / "evidence/pairs/diff-v2/log.jsonl").stat().st_mtime_ns == steps
