"""Generation in ONNX Runtime beside torch and its peers: tokens a second, folder bytes and peak memory.

    python -m research.bench.programs.generate MODEL.gguf DIFF-V2-FOLDER --json bench/results/generate.json

Every contestant has a process of its own, the same tokens and threads, and they take turns (A B A B),
so that what else the machine does falls on all of them. Decoding is timed from the first new token to
the last; prefill fills the cache and gives the last position's logits in one pass, and in transformers' exports and
llama.cpp's Python binding those of every position. Peak memory is the process's largest resident set from its start to
the end of its generating. Each row names whose kernels ran; without the native library the rows that are to run it are
refused.

Batches are read and continued, too: so many prompts at once, whose tokens are counted together. What takes one sequence
at a time has no numbers there.

What memory or time cannot hold at once goes in pieces: `--write --exports FOLDER` makes the contestants'
folders beforehand, `--contestants` names who runs beside torch, and `--merge` adds them to a file. A
share of torch's is always of the torch that ran in the same piece, which each row keeps with its own
numbers; a share of the float32 export's is of the newest float32 export in the file.

llama-bench does not tell its tokens, and its memory is not counted.

On busy cores `--threads 1 --cpu-seconds` counts a process's seconds on a processor, which others don't take; what
they do to its caches and memory stays in.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer

from diffquant.benchmarks.measuring import describe_environment
from diffquant.errors import UsageError
from diffquant.onnx.native import library_path
from diffquant.support.names import option_name
from research.bench.programs.comparison import compare_with_export, compare_with_torch, table
from research.bench.programs.contestants import (
    CONTESTANTS,
    FLOAT,
    TORCH,
    asked,
    chosen,
    folder_of,
    may_be_missing,
    open_engine,
    peak_bytes,
    reason,
    takes_batches,
    write_all,
)
from research.bench.programs.engines import random_tokens
from tests.support.apart import CORES, JsonFile, Threads, tell


@dataclass(frozen=True)
class Settings:
    """Settings of a measurement, the same for each contestant.

    Attributes:
        threads: threads of each process.
        repeats: turns of each contestant.
        prompt: tokens before the new ones.
        new: tokens to generate.
        prefill: tokens of the prompt that is run alone.
        batches: numbers of prompts that are read and continued at once, beside one alone.
        cpu_seconds: whether seconds are a process's on a processor, and not the clock's.
    """

    threads: int
    repeats: int = 5
    prompt: int = 64
    new: int = 64
    prefill: int = 1024
    batches: tuple[int, ...] = (4, 16)
    cpu_seconds: bool = False


def measure_generation(model: Path, place: Path, names: Sequence[str], settings: Settings) -> dict[str, dict[str, Any]]:
    """Numbers of each contestant on a model, or why it has none; torch must be among them."""
    check_kernels(names)
    rows = write_all(model, place, names)
    pools = {}
    for name, row in rows.items():
        if "missing" in row:
            continue
        try:
            pools[name], row["about"] = admit(name, model, place, settings)
        except Exception as error:  # a peer may fail with anything here, too
            if not may_be_missing(name, error):
                raise
            rows[name] = {"missing": reason(error)}
            continue
        row |= {"decode": [], "prefill": []}
    prompt, long_prompt = random_tokens(model, settings.prompt), random_tokens(model, settings.prefill)
    for _ in range(settings.repeats):
        for name, pool in pools.items():
            speed, rows[name]["tokens"] = pool.submit(asked, "decode", prompt, settings.new).result()
            rows[name]["decode"].append(speed)
    for name, pool in pools.items():
        rows[name]["peak_bytes"] = pool.submit(peak_bytes).result()
        pool.submit(asked, "prefill", long_prompt).result()  # warms up
    for _ in range(settings.repeats):
        for name, pool in pools.items():
            rows[name]["prefill"].append(pool.submit(asked, "prefill", long_prompt).result())
    measure_batches(model, pools, rows, settings)
    for name, pool in pools.items():
        rows[name]["kernels"] = pool.submit(asked, "kernels").result()
        pool.shutdown()
        compare_with_torch(rows[name], rows[TORCH])
    return rows


def measure_batches(
    model: Path, pools: Mapping[str, ProcessPoolExecutor], rows: dict[str, dict[str, Any]], settings: Settings
) -> None:
    """Add to each row the speeds of several sequences at once, by their number; none where a model takes one."""
    taking = {name: pool for name, pool in pools.items() if pool.submit(takes_batches).result()}
    for size in settings.batches:
        prompts = random_tokens(model, size * settings.prompt).reshape(size, settings.prompt)
        for name in taking:
            rows[name].setdefault("batches", {})[str(size)] = {"decode": [], "prefill": []}
        for _ in range(settings.repeats):
            for name, pool in taking.items():
                speeds = rows[name]["batches"][str(size)]
                speeds["prefill"].append(pool.submit(asked, "prefill", prompts).result())
                speeds["decode"].append(pool.submit(asked, "decode", prompts, settings.new).result()[0])


def check_kernels(names: Sequence[str]) -> None:
    """Refuse contestants that are to run kernels which are not there: their rows would be another's.

    Raises:
        UsageError: the native library is not built, or the environment turns it off.
    """
    native = [name for name in names if CONTESTANTS[name].native]
    if native and library_path() is None:
        raise UsageError(
            f"{', '.join(map(repr, native))} run the native library, and there is none: build it by "
            "python -m diffquant.onnx.native, and leave DIFFQUANT_NATIVE_LIBRARY unset"
        )


def admit(name: str, model: Path, place: Path, settings: Settings) -> tuple[ProcessPoolExecutor, Mapping[str, str]]:
    """Pool of one process that has the contestant's model open and warm, and what a result must say of its engine."""
    folder = folder_of(name, place) if CONTESTANTS[name].write else model
    pool = ProcessPoolExecutor(1, get_context("spawn"))
    about = pool.submit(open_engine, name, folder, settings.threads, settings.cpu_seconds).result()
    pool.submit(asked, "decode", random_tokens(model, settings.prompt), settings.new).result()
    return pool, about


def main(
    models: Annotated[list[Path], typer.Argument(help="A .gguf file or a folder, each.")],
    threads: Threads = CORES,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each contestant.")] = Settings.repeats,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens before the new ones.")] = Settings.prompt,
    new: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = Settings.new,
    prefill: Annotated[int, typer.Option(min=1, help="Tokens of a prompt run alone.")] = Settings.prefill,
    batches: Annotated[str, typer.Option(help="Numbers of prompts at once, with commas; empty for none.")] = "4,16",
    cpu_seconds: Annotated[
        bool, typer.Option("--cpu-seconds", help="Count a process's CPU seconds, for busy cores; takes --threads 1.")
    ] = False,
    contestants: Annotated[str, typer.Option(help="Who runs beside torch, with semicolons; all by default.")] = "",
    exports: Annotated[
        Path | None, typer.Option(help="Keep the contestants' folders here, and take those that are.")
    ] = None,
    only_write: Annotated[bool, typer.Option("--write", help="Only make the folders.")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Add to the file that is there.")] = False,
    file: JsonFile = None,
) -> None:
    """Measure generation in ONNX Runtime beside torch and its peers."""
    names = chosen(contestants)
    if only_write:
        if exports is None:
            raise UsageError(f"{option_name('write')} needs {option_name('exports', 'FOLDER')} to keep what it writes")
        for model in models:
            print(json.dumps({model.name: write_all(model, _place(exports, model), names)}, indent=1))
        return
    if cpu_seconds and threads > 1:
        raise UsageError(
            f"{option_name('cpu_seconds', True)} counts what threads wait, too; give {option_name('threads', 1)}"
        )
    sizes = tuple(int(size) for size in batches.split(",") if size.strip())
    settings = Settings(threads, repeats, prompt, new, prefill, sizes, cpu_seconds)
    packages = ("onnx", "onnxruntime", "onnxruntime-genai", "llama_cpp_python")
    result: dict[str, Any] = {"environment": describe_environment(*packages), "models": {}}
    if merge and file and file.is_file():
        result = json.loads(file.read_text()) | {"environment": result["environment"]}
    for model in models:
        with tempfile.TemporaryDirectory() as place:
            rows = measure_generation(model, _place(exports or Path(place), model), names, settings)
        for row in rows.values():
            # With each row, since a merged file has rows of several runs.
            row["settings"] = asdict(settings) | {
                what: result["environment"][what] for what in ("commit", "date", "cpu")
            }
        everyone = result["models"].setdefault(model.name, {})
        # The first torch stays: a later one ran beside fewer, and is kept with the rows that refer to it.
        everyone |= {name: row for name, row in rows.items() if name != TORCH or name not in everyone}
        compare_with_export(everyone, FLOAT)
        tell(result, file, table(model.name, everyone))


def _place(exports: Path, model: Path) -> Path:
    place = exports / f"{model.name}-exports"
    place.mkdir(parents=True, exist_ok=True)
    return place


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
