"""Generation in ONNX Runtime beside torch and its peers: tokens a second, folder bytes and peak memory.

    python -m diffquant.bench.programs.generate MODEL.gguf DIFF-V2-FOLDER --json bench/results/generate.json

Every contestant has a process of its own, the same tokens and threads, and they take turns (A B A B),
so that what else the machine does falls on all of them. Decoding is timed from the first new token to
the last; prefill gives the logits of every position and fills the cache, in one pass. Peak memory is
the process's largest resident set from its start to the end of its generating.

What memory or time cannot hold at once goes in pieces: `--write --exports FOLDER` makes the contestants'
folders beforehand, `--contestants` names who runs beside torch, and `--merge` adds them to a file. A
share of torch's is always of the torch that ran in the same piece, a share of the float32 export's of
the newest float32 export in the file.
"""

import argparse
import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from diffquant.bench.environment import environment
from diffquant.bench.memory import AnonymousPeak, resident
from diffquant.bench.programs.engines import (
    Engine,
    open_export,
    open_llama_cpp,
    open_torch,
    open_transformers,
    random_tokens,
    write_export,
    write_llama_cpp,
    write_transformers,
)
from diffquant.errors import MissingDependencyError, UsageError
from diffquant.report.tables import aligned


@dataclass(frozen=True)
class Contestant:
    """Writes a model's folder, where it needs one, and opens it on so many threads; a peer may be unable to."""

    write: Callable[[Path, Path], None] | None
    open: Callable[[Path, int], Engine]
    peer: bool = False


COUNTS = {"repeats": 5, "prompt": 64, "new": 64, "prefill": 1024}
LOW_BITS = {"weights": "4:g32", "kv_bits": 8, "embed_bits": 8}
TORCH, FLOAT = "torch float32", "export float32"
CONTESTANTS = {
    TORCH: Contestant(None, open_torch),
    FLOAT: Contestant(partial(write_export, {}), open_export),
    "export 4:g32 kv 8 embed 8": Contestant(partial(write_export, LOW_BITS), open_export),
    "transformers export": Contestant(partial(write_transformers, None, 16), open_transformers, peer=True),
    "transformers export, fused": Contestant(partial(write_transformers, "cpu", 16), open_transformers, peer=True),
    "transformers export, fused, 4 bits": Contestant(
        partial(write_transformers, "cpu", 4), open_transformers, peer=True
    ),
    "llama.cpp Q4_0": Contestant(write_llama_cpp, open_llama_cpp, peer=True),
}
_engines: list[Engine] = []  # the one of this process


def write(name: str, model: Path, folder: Path) -> dict[str, Any]:
    """Make a contestant's folder: seconds, and the process's memory at most without mapped files."""
    make = CONTESTANTS[name].write
    if make is None:
        return {}
    started = time.perf_counter()
    with AnonymousPeak() as watched:
        make(model, folder)
    seconds = time.perf_counter() - started
    return {"write_seconds": seconds, "write_anonymous_bytes": watched.peak}


def open_engine(name: str, folder: Path, threads: int) -> None:
    _engines.append(CONTESTANTS[name].open(folder, threads))


def decode(prompt: np.ndarray, count: int) -> tuple[float, list[int]]:
    """Decoded tokens a second of this process's model, and the tokens."""
    tokens, times = _engines[0].generate(prompt, count)
    return (count - 1) / (times[-1] - times[0]), tokens


def prefill(prompt: np.ndarray) -> float:
    """Prompt tokens a second of this process's model."""
    started = time.perf_counter()
    _engines[0].prefill(prompt)
    return prompt.shape[1] / (time.perf_counter() - started)


def peak_bytes() -> int:
    """Largest resident set of this process; getrusage's can be its parent's."""
    return resident().peak


def write_all(model: Path, place: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Make the folders that are not there yet; what each took, or why there is none."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        folder = folder_of(name, place)
        note = folder.with_name(f"{folder.name}.json")
        if not note.is_file():
            note.write_text(json.dumps(_attempt(name, model, folder)))
        found[name] = json.loads(note.read_text())
    return found


def _attempt(name: str, model: Path, folder: Path) -> dict[str, Any]:
    """In a process of its own, whose memory is its own."""
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as writer:
            took = writer.submit(write, name, model, folder).result()
    except Exception as error:  # whatever a peer fails with, the table says it
        if not may_be_missing(name, error):
            raise
        return {"missing": reason(error)}
    return took | {"folder_bytes": sum(file.stat().st_size for file in folder.glob("*")) or None}


def may_be_missing(name: str, error: Exception) -> bool:
    """Whether the others run where a contestant failed: it is a peer, or packages are not installed."""
    return CONTESTANTS[name].peer or isinstance(error, MissingDependencyError)


def folder_of(name: str, place: Path) -> Path:
    return place / re.sub(r"[^\w.]+", "-", name)


def measure(model: Path, place: Path, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Each contestant's numbers on a model, or why it has none."""
    found = write_all(model, place, options.contestants)
    pools = {}
    for name, row in found.items():
        if "missing" in row:
            continue
        try:
            pools[name] = admit(name, model, place, options)
        except Exception as error:  # as above
            if not may_be_missing(name, error):
                raise
            found[name] = {"missing": reason(error)}
            continue
        row |= {"decode": [], "prefill": []}
    prompt, long_prompt = random_tokens(model, options.prompt), random_tokens(model, options.prefill)
    for _ in range(options.repeats):
        for name, pool in pools.items():
            speed, found[name]["tokens"] = pool.submit(decode, prompt, options.new).result()
            found[name]["decode"].append(speed)
    for name, pool in pools.items():
        found[name]["peak_bytes"] = pool.submit(peak_bytes).result()
        pool.submit(prefill, long_prompt).result()  # warms up
    for _ in range(options.repeats):
        for name, pool in pools.items():
            found[name]["prefill"].append(pool.submit(prefill, long_prompt).result())
    for name, pool in pools.items():
        pool.shutdown()
        compare(found[name], found[TORCH])
    return found


def admit(name: str, model: Path, place: Path, options: argparse.Namespace) -> ProcessPoolExecutor:
    """A process that has the contestant's model open and warm."""
    folder = folder_of(name, place) if CONTESTANTS[name].write else model
    pool = ProcessPoolExecutor(1, get_context("spawn"))
    pool.submit(open_engine, name, folder, options.threads).result()
    pool.submit(decode, random_tokens(model, options.prompt), options.new).result()
    return pool


def compare(row: dict[str, Any], torch: dict[str, Any]) -> None:
    """Add medians, times torch's speed, the share of its memory, and how many leading tokens are like torch's."""
    for what in ("decode", "prefill"):
        row[f"{what}_median"] = median(row[what])
        row[f"{what}_of_torch"] = median(row[what]) / median(torch[what])
    row["peak_of_torch"] = row["peak_bytes"] / torch["peak_bytes"]
    same = [a == b for a, b in zip(row["tokens"], torch["tokens"], strict=True)]
    row["same_tokens"] = [*same, False].index(False)


def compare_with_export(found: dict[str, dict[str, Any]]) -> None:
    """Add each one's share of the float32 export's folder and memory, where that was measured."""
    reference = found.get(FLOAT, {})
    for row in found.values():
        if reference.get("folder_bytes") and row.get("folder_bytes"):
            row["folder_of_export"] = row["folder_bytes"] / reference["folder_bytes"]
        if "peak_bytes" in reference and "peak_bytes" in row:
            row["peak_of_export"] = row["peak_bytes"] / reference["peak_bytes"]


def reason(error: Exception) -> str:
    """An error's type and first sentence; of its paths the last parts."""
    text = str(error).strip().split("\n")[0].split(". ")[0]
    places = r"(?<![\w.])/[\w./-]*/"
    return f"{type(error).__name__}: {re.sub(places, '', text)}"


def table(model: str, found: dict[str, Any]) -> str:
    """A line a contestant: medians (spread), and each as a share."""
    columns = ["decode tokens/s", "of torch", "prefill tokens/s", "of torch", "folder MB", "of f32", "peak MB"]
    head = [model, *columns, "of torch", "of f32", "same tokens", "written in s", "with MB"]
    rows = []
    for name, row in found.items():
        if "missing" in row:
            continue
        speeds = []
        for what in ("decode", "prefill"):
            speeds.append(f"{row[f'{what}_median']:.1f} ({min(row[what]):.1f}-{max(row[what]):.1f})")
            speeds.append(f"{row[f'{what}_of_torch']:.2f}")
        folder = [_text(row, "folder_bytes", 1e-6, ".0f"), _text(row, "folder_of_export", 1, ".3f")]
        peak = [_text(row, "peak_bytes", 1e-6, ".0f")]
        peak += [_text(row, what, 1, ".2f") for what in ("peak_of_torch", "peak_of_export")]
        written = [_text(row, "write_seconds", 1, ".1f"), _text(row, "write_anonymous_bytes", 1e-6, ".0f")]
        rows.append([name, *speeds, *folder, *peak, str(row["same_tokens"]), *written])
    missing = [f"{name}: none, {row['missing']}" for name, row in found.items() if "missing" in row]
    return "\n".join([*aligned(head, rows), *missing])


def _text(row: dict[str, Any], what: str, factor: float, spec: str) -> str:
    return "-" if row.get(what) is None else format(row[what] * factor, spec)


def main() -> None:
    options = _parser().parse_args()
    options.contestants = [name for name in CONTESTANTS if name in {TORCH, *options.contestants}]
    if options.write:
        if options.exports is None:
            raise UsageError("--write needs --exports FOLDER to keep what it writes")
        for model in options.models:
            found = write_all(model, _place(options.exports, model), options.contestants)
            print(json.dumps({model.name: found}, indent=1))
        return
    packages = ("onnx", "onnxruntime", "nncf", "llama_cpp_python")
    result: dict[str, Any] = {"environment": environment(*packages), "models": {}}
    # With each row, since a merged file has rows of several runs.
    settings = {name: getattr(options, name) for name in ("threads", *COUNTS)}
    settings["commit"] = result["environment"]["commit"]
    if options.merge and options.file and options.file.is_file():
        result = json.loads(options.file.read_text()) | {"environment": result["environment"]}
    for model in options.models:
        with tempfile.TemporaryDirectory() as place:
            found = measure(model, _place(options.exports or Path(place), model), options)
        for row in found.values():
            row["settings"] = settings
        everyone = result["models"].setdefault(model.name, {})
        # The first torch stays: a later one ran beside fewer.
        everyone |= {name: row for name, row in found.items() if name != TORCH or name not in everyone}
        compare_with_export(everyone)
        if options.file:
            options.file.write_text(json.dumps(result, indent=1) + "\n")
        print(table(model.name, everyone), flush=True)


def _place(exports: Path, model: Path) -> Path:
    place = exports / f"{model.name}-exports"
    place.mkdir(parents=True, exist_ok=True)
    return place


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", type=Path, nargs="+", help="a .gguf file or a folder, each")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    for name, default in COUNTS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    names = list(CONTESTANTS)
    parser.add_argument("--contestants", nargs="*", choices=names, default=names, help="who runs beside torch; all")
    parser.add_argument("--exports", type=Path, help="keep the contestants' folders here, and take those that are")
    parser.add_argument("--write", action="store_true", help="only make the folders")
    parser.add_argument("--merge", action="store_true", help="add to the file that is there")
    parser.add_argument("--json", type=Path, dest="file", help="where to write the numbers")
    return parser


if __name__ == "__main__":
    main()
