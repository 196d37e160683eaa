"""The evidence script as far as it goes without a GPU: what travels, what is run in what order, what comes back."""

import gzip
import hashlib
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "bench" / "gpu" / "evidence.sh"
# Says what it was asked for, and leaves what the real one would.
PYTHON = """#!/bin/bash
echo "$*" >> "$STATE.log"
case "$*" in
    *"import gguf"*) echo "$GGUF" ;;
    *train.pairs*) mkdir -p "$STATE/pairs/diff-v1"
        head -c 40000000 /dev/urandom > "$STATE/pairs/diff-v1/delta.safetensors"
        echo {} > "$STATE/pairs/results.json"; touch "$STATE/pairs/diff-v1/checkpoint.pt"; echo trained ;;
    *sweep*) mkdir -p "$STATE/sweep"; touch "$STATE/sweep/sweep.json" "$STATE/sweep/table.csv" ;;
    *"-m diffquant.bench.gpu"*) [ -z "$FAILING" ] && touch "$OUT/gpu.json" ;;
esac
"""


@pytest.fixture
def machine(tmp_path):
    """A function that runs the script, with a Python that does nothing, no GPU and no profiler."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "python3").write_text(PYTHON)
    (bin_folder / "python3").chmod(0o755)
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "__init__.py").touch()
    environment = os.environ | {
        "PATH": f"{bin_folder}:/usr/bin:/bin",
        "STATE": str(tmp_path / "state"),
        "OUT": str(tmp_path / "out"),
        "GGUF": str(tmp_path / "gguf"),
        "WAIT": "30",
        "FAILING": "",
    }

    def run(*arguments, **changes):
        command = ["bash", SCRIPT, *map(str, arguments)]
        return subprocess.run(command, env=environment | changes, capture_output=True, text=True)

    return run


def done(process):
    assert process.returncode == 0, process.stderr
    return process


def test_a_model_travels_in_three_parts_and_results_come_back_in_pieces(machine, tmp_path):
    model, items, books = tmp_path / "model.gguf", tmp_path / "items.jsonl.gz", tmp_path / "books.txt"
    model.write_bytes(os.urandom(3_000_001))
    items.write_bytes(gzip.compress(b"{}"))
    books.write_text("It was a dark and stormy night.\n" * 99)
    packed, out, state = tmp_path / "packed", tmp_path / "out", tmp_path / "state"
    done(machine("pack", model, items, books, packed))
    assert sorted(file.name for file in packed.glob("*/model.?")) == ["model.1", "model.2", "model.3"]
    for number in (1, 2, 3):
        done(machine(number, packed / str(number)))
    assert (state / "model.gguf").read_bytes() == model.read_bytes()
    assert (state / "books.txt").read_text() == books.read_text()
    asked = Path(f"{state}.log").read_text()
    order = ["diffquant.bench.gpu --json", "pytest tests/gpu", "diffquant.cli convert", "diffquant.cli sweep"]
    assert sorted(order, key=asked.index) == order
    assert "--minutes 15 --device cuda" in asked
    assert {"gpu.json", "device.txt", "gpu-test.txt", "no-profile.txt", "sweep.json"} <= set(os.listdir(out))
    for file in out.iterdir():
        file.unlink()
    done(machine(4))
    pieces = sorted(out.glob("pairs.tar.*"))
    assert len(pieces) == 3
    assert max(piece.stat().st_size for piece in pieces) == 15_000_000
    assert len(list(out.iterdir())) <= 8
    done(machine("unpack", out, tmp_path / "back"))
    digests = [
        hashlib.sha256((folder / "pairs/diff-v1/delta.safetensors").read_bytes()).digest()
        for folder in (state, tmp_path / "back")
    ]
    assert digests[0] == digests[1]
    # What only resuming needs stays there.
    assert not (tmp_path / "back/pairs/diff-v1/checkpoint.pt").exists()


def test_a_part_that_was_damaged_or_is_too_large_is_not_run(machine, tmp_path):
    packed, small = tmp_path / "packed", tmp_path / "small"
    small.write_bytes(b"some text")
    done(machine("pack", small, small, small, packed))
    (packed / "2" / "model.2").write_bytes(b"other")
    for number in (1, 2):
        done(machine(number, packed / str(number)))
    assert machine(3, packed / "3").returncode != 0
    assert "sweep" not in Path(f"{tmp_path}/state.log").read_text()
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(3 * (64 << 20) + 9)
    assert "larger than 64 MiB" in machine("pack", large, small, small, tmp_path / "other").stderr
    assert machine("nonsense").returncode == 2


def test_a_failed_bench_fails_the_first_command(machine, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "commit").write_text("c0ffee\n")
    assert machine(1, tmp_path / "folder", FAILING="yes").returncode != 0
    assert "c0ffee" in (tmp_path / "out" / "device.txt").read_text()
