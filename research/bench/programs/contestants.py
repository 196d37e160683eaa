"""Who generates in the bench: how each writes its folder, and its engine in a process of its own."""

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from diffquant.benchmarks.measuring import measure_resident_bytes
from diffquant.errors import MissingDependencyError, UsageError
from research.bench.programs.engines import Engine, count_cpu_seconds, open_export, open_torch, write_export
from research.bench.programs.peer_engines import (
    open_genai,
    open_llama_bench,
    open_llama_cpp,
    open_transformers,
    write_genai,
    write_llama_cpp,
    write_transformers,
)


@dataclass(frozen=True)
class Contestant:
    """A way to generate.

    Attributes:
        write: function that writes a model's folder, or None to open the model itself.
        open: function that opens a folder on so many threads.
        peer: whether it is another library's, which may be unable to run a model.
        native: whether it is to run the native library's kernels wherever the model has nodes for them.
    """

    write: Callable[[Path, Path], None] | None
    open: Callable[[Path, int], Engine]
    peer: bool = False
    native: bool = False


LOW_BITS = {"weights": "4:g32", "kv_bits": 8, "embed_bits": 8}
KV_4 = LOW_BITS | {"kv_bits": 4}
TORCH, FLOAT = "torch float32", "export float32"
CONTESTANTS = {
    TORCH: Contestant(None, open_torch),
    FLOAT: Contestant(partial(write_export, {}), open_export, native=True),
    "export 4:g32 kv 8 embed 8": Contestant(partial(write_export, LOW_BITS), open_export, native=True),
    "export 4:g32 kv 4 embed 8": Contestant(partial(write_export, KV_4), open_export, native=True),
    "function body, 4:g32 kv 8": Contestant(partial(write_export, LOW_BITS), partial(open_export, native=False)),
    "transformers export": Contestant(partial(write_transformers, None), open_transformers, peer=True),
    "transformers export, fused": Contestant(partial(write_transformers, "cpu"), open_transformers, peer=True),
    "onnxruntime-genai int4": Contestant(write_genai, open_genai, peer=True),
    "llama.cpp Q4_0": Contestant(write_llama_cpp, open_llama_cpp, peer=True),
    "llama-bench Q4_0": Contestant(write_llama_cpp, open_llama_bench, peer=True),
}
_POLL_SECONDS = 0.01
_engines: list[Engine] = []  # the one of this process


def chosen(names: str) -> list[str]:
    """Names of torch and of the contestants in a list with semicolons, in the contest's order; all where it is empty.

    Raises:
        UsageError: no contestant has one of the names.
    """
    wanted = {name.strip() for name in names.split(";") if name.strip()}
    if wanted - CONTESTANTS.keys():
        unknown = ", ".join(map(repr, sorted(wanted - CONTESTANTS.keys())))
        raise UsageError(f"no contestant is called {unknown}; choose from {'; '.join(CONTESTANTS)}")
    return [name for name in CONTESTANTS if not wanted or name in {TORCH, *wanted}]


def write_all(model: Path, place: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Write the folders that are not there yet; returns what each took, or why there is none."""
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        folder = folder_of(name, place)
        note = folder.with_name(f"{folder.name}.json")
        if not note.is_file():
            note.write_text(json.dumps(_attempt(name, model, folder)))
        rows[name] = json.loads(note.read_text())
    return rows


def _attempt(name: str, model: Path, folder: Path) -> dict[str, Any]:
    """Numbers of writing a contestant's folder in a process whose memory is its own."""
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as writer:
            took = writer.submit(write_folder, name, model, folder).result()
    except Exception as error:  # whatever a peer fails with, the table says it
        if not may_be_missing(name, error):
            raise
        return {"missing": reason(error)}
    return took | {"folder_bytes": sum(file.stat().st_size for file in folder.glob("*")) or None}


def may_be_missing(name: str, error: Exception) -> bool:
    """Whether the others run where a contestant failed: it is a peer, or packages are not installed."""
    return CONTESTANTS[name].peer or isinstance(error, MissingDependencyError)


def folder_of(name: str, place: Path) -> Path:
    """Path of a contestant's folder."""
    return place / re.sub(r"[^\w.]+", "-", name)


def write_folder(name: str, model: Path, folder: Path) -> dict[str, Any]:
    """Write a contestant's folder; returns seconds, and the process's peak memory without mapped files."""
    make = CONTESTANTS[name].write
    if make is None:
        return {}
    started = time.perf_counter()
    with AnonymousPeak() as watched:
        make(model, folder)
    seconds = time.perf_counter() - started
    return {"write_seconds": seconds, "write_anonymous_bytes": watched.peak}


def open_engine(name: str, folder: Path, threads: int, cpu_seconds: bool) -> Mapping[str, str]:
    """Open a contestant's folder as this process's model; returns what a result must say of the engine."""
    if cpu_seconds:
        count_cpu_seconds()
    _engines.append(CONTESTANTS[name].open(folder, threads))
    return _engines[0].about


def asked(what: str, *arguments: object) -> Any:
    """Call one of the functions of this process's engine, by its name."""
    return getattr(_engines[0], what)(*arguments)


def takes_batches() -> bool:
    """Whether this process's engine takes several sequences at once."""
    return _engines[0].takes_batches


def peak_bytes() -> int | None:
    """Largest resident set of this process; getrusage's can be its parent's. None if the model runs elsewhere."""
    return None if _engines[0].elsewhere else measure_resident_bytes()[0]


def reason(error: Exception) -> str:
    """Text of an error: its type and first sentence, with the last parts of paths alone."""
    text = str(error).strip().split("\n")[0].split(". ")[0]
    places = r"(?<![\w.])/[\w./-]*/"
    return f"{type(error).__name__}: {re.sub(places, '', text)}"


class AnonymousPeak:
    """Watches the anonymous memory of this process while a block runs.

    Attributes:
        before: anonymous bytes when the block began.
        peak: largest number of anonymous bytes seen.
    """

    def __enter__(self) -> "AnonymousPeak":
        _, self.before = measure_resident_bytes()
        self.peak = self.before
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.is_set():
            _, anonymous = measure_resident_bytes()
            self.peak = max(self.peak, anonymous)
            time.sleep(_POLL_SECONDS)
