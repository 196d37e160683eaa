"""Generation in ONNX Runtime beside torch: tokens a second, folder bytes and peak memory.

    python -m diffquant.bench.generate MODEL.gguf DIFF-V2-FOLDER --json bench/results/generate.json

Every contestant has a process of its own, the same tokens and threads, and they take turns (A B A B),
so that what else the machine does falls on all of them. Decoding is timed from the first new token to
the last; prefill gives the logits of every position and fills the cache, in one pass. Peak memory is
the process's largest resident set from its start to the end of its generating.
"""

import argparse
import importlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from .environment import environment

# torch is imported where it is used: a process that runs without it must not pay its memory.

Step = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Engine:
    """An open model: `generate` gives new tokens and the time of each, `prefill` runs a prompt alone."""

    generate: Callable[[np.ndarray, int], tuple[list[int], list[float]]]
    prefill: Callable[[np.ndarray], Any]


@dataclass(frozen=True)
class Contestant:
    """Writes a model's folder, where it needs one, and opens it on so many threads; a peer may be unable to."""

    write: Callable[[Path, Path], None] | None
    open: Callable[[Path, int], Engine]
    peer: bool = False


def open_torch(model: Path, threads: int) -> Engine:
    """DiffTransformer, through transformers' `generate`."""
    import torch

    from diffquant.checkpoint.load import load

    torch.set_num_threads(threads)
    opened = load(model, dtype=torch.float32)
    opened.generation_config.eos_token_id = None  # everyone generates the same count

    def generate(prompt: np.ndarray, count: int) -> tuple[list[int], list[float]]:
        clock = Clock()
        opened.generate(torch.from_numpy(prompt), max_new_tokens=count, do_sample=False, streamer=clock, pad_token_id=0)
        return clock.tokens[1:], clock.times[1:]

    @torch.inference_mode()
    def prefill(prompt: np.ndarray) -> Any:
        return opened(torch.from_numpy(prompt), use_cache=True).logits

    return Engine(generate, prefill)


class Clock:
    """A streamer for transformers' `generate`; it is given the prompt first, which counts as one token here."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []

    def put(self, ids: Any) -> None:
        self.tokens.append(int(ids.flatten()[-1]))
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


def stepping(start: Callable[[int], Step]) -> Engine:
    """Greedy decoding by a function from tokens [1, T] to logits; `start` makes one with room for so many tokens."""

    def generate(prompt: np.ndarray, count: int) -> tuple[list[int], list[float]]:
        step, ids = start(prompt.shape[1] + count), prompt
        tokens, times = [], []
        for _ in range(count):
            tokens.append(int(step(ids)[0, -1].argmax()))
            times.append(time.perf_counter())
            ids = np.array([tokens[-1:]])
        return tokens, times

    return Engine(generate, lambda prompt: start(prompt.shape[1])(prompt))


def write_export(options: dict[str, Any], model: Path, folder: Path) -> None:
    """diffquant's export; a model without a tokenizer is calibrated on random tokens."""
    # Rooms do not import each other: the exporter is looked up when this runs as a program.
    export = importlib.import_module("diffquant.export")
    has_text = model.is_file() or (model / "tokenizer.json").is_file()
    calibration = None if has_text else random_tokens(model, 64).tolist()
    export.export(model, folder, export.ExportOptions.parse(**options), calibration=calibration)


def open_export(folder: Path, threads: int) -> Engine:
    session = importlib.import_module("diffquant.export.session")
    model = session.OnnxModel(folder, threads)
    return stepping(lambda rows: session.InPlace(model, 1, rows).step)


def write_peer(fusions: str | None, model: Path, folder: Path) -> None:
    """transformers' own export: one graph that takes prompts as well as single tokens."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.exporters import ExportedModel, OnnxConfig, OnnxExporter
    from transformers.utils.quantization_config import GgufConfig

    gguf = {"gguf_file": model.name, "quantization_config": GgufConfig(dequantize=True)} if model.is_file() else {}
    place = model.parent if gguf else model
    opened = AutoModelForCausalLM.from_pretrained(place, **gguf, dtype=torch.float32, local_files_only=True).eval()
    ids = torch.from_numpy(random_tokens(model, 16))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    config = OnnxConfig(dynamic=True, ort_fusions=fusions)
    with redirect_stdout(sys.stderr):  # its progress is not our table
        exported = OnnxExporter().export_for_generation(opened, inputs, config, multi_token_decode=True)
    graph = {"decode": exported.components["decode"]}
    ExportedModel(graph, exported.export_format, config=exported.config).save_pretrained(folder)


def open_peer(folder: Path, threads: int) -> Engine:
    """Its cache grows by concatenation; what one call returns is the next one's input, without a copy."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = ort.InferenceSession(str(folder / "decode.onnx"), options, providers=["CPUExecutionProvider"])
    caches = [value for value in session.get_inputs() if "past_key_values" in value.name]

    def start(_: int) -> Step:
        shapes = [(1, int(value.shape[1]), 0, int(value.shape[3])) for value in caches]
        past = [ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, np.float32)) for shape in shapes]
        length = 0

        def step(ids: np.ndarray) -> np.ndarray:
            nonlocal past, length
            binding = session.io_binding()
            binding.bind_cpu_input("input_ids", ids)
            binding.bind_cpu_input("position_ids", np.arange(length, length + ids.shape[1])[None])
            for value, cache in zip(caches, past, strict=True):
                binding.bind_ortvalue_input(value.name, cache)
            for output in session.get_outputs():
                binding.bind_output(output.name, "cpu")
            session.run_with_iobinding(binding)
            logits, *past = binding.get_outputs()
            length += ids.shape[1]
            return np.asarray(logits.numpy())

        return step

    return stepping(start)


COUNTS = {"repeats": 5, "prompt": 64, "new": 64, "prefill": 1024}
LOW_BITS = {"weights": "4:g32", "kv_bits": 8, "embed_bits": 8}
TORCH, FLOAT = "torch float32", "export float32"
CONTESTANTS = {
    TORCH: Contestant(None, open_torch),
    FLOAT: Contestant(partial(write_export, {}), open_export),
    "export 4:g32 kv 8 embed 8": Contestant(partial(write_export, LOW_BITS), open_export),
    "transformers export": Contestant(partial(write_peer, None), open_peer, peer=True),
    "transformers export, fused": Contestant(partial(write_peer, "cpu"), open_peer, peer=True),
}
_engines: list[Engine] = []  # the one of this process


def write(name: str, model: Path, folder: Path) -> int:
    """Make a contestant's folder if it needs one; its bytes."""
    make = CONTESTANTS[name].write
    if make is not None:
        make(model, folder)
    return sum(file.stat().st_size for file in folder.glob("*"))


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
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def measure(model: Path, place: Path, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Each contestant's numbers on a model, or why it has none."""
    found: dict[str, dict[str, Any]] = {}
    pools = {}
    for name, contestant in CONTESTANTS.items():
        if name in options.without:
            found[name] = {"missing": "left out by --without"}
            continue
        try:
            pools[name], nbytes = admit(name, model, place / name.replace(" ", "-"), options)
            found[name] = {"decode": [], "prefill": [], "folder_bytes": nbytes or None}
        except Exception as error:  # whatever a peer fails with, the table says it
            if not contestant.peer:
                raise
            found[name] = {"missing": reason(error)}
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
        compare(found[name], found[TORCH], found[FLOAT])
    return found


def admit(name: str, model: Path, folder: Path, options: argparse.Namespace) -> tuple[ProcessPoolExecutor, int]:
    """A process that has the contestant's model open and warm, and the bytes of a folder written in another one."""
    with ProcessPoolExecutor(1, get_context("spawn")) as writer:
        nbytes = writer.submit(write, name, model, folder).result()
    pool = ProcessPoolExecutor(1, get_context("spawn"))
    pool.submit(open_engine, name, folder if nbytes else model, options.threads).result()
    pool.submit(decode, random_tokens(model, options.prompt), options.new).result()
    return pool, nbytes


def compare(row: dict[str, Any], torch: dict[str, Any], reference: dict[str, Any]) -> None:
    """Add medians, times torch's speed, shares of torch's and the float32 export's, and leading tokens like torch's."""
    for what in ("decode", "prefill"):
        row[f"{what}_median"] = median(row[what])
        row[f"{what}_of_torch"] = median(row[what]) / median(torch[what])
    if row["folder_bytes"]:
        row["folder_of_export"] = row["folder_bytes"] / reference["folder_bytes"]
    row["peak_of_torch"] = row["peak_bytes"] / torch["peak_bytes"]
    row["peak_of_export"] = row["peak_bytes"] / reference["peak_bytes"]
    same = [a == b for a, b in zip(row["tokens"], torch["tokens"], strict=True)]
    row["same_tokens"] = [*same, False].index(False)


def random_tokens(model: Path, count: int) -> np.ndarray:
    """[1, count], the same every time; speed does not depend on what they say."""
    from diffquant.checkpoint.reader import open_checkpoint

    return np.random.default_rng(0).integers(0, open_checkpoint(model).config["vocab_size"], (1, count))


def reason(error: Exception) -> str:
    """An error's type and first sentence; of its paths the last parts."""
    text = str(error).strip().split("\n")[0].split(". ")[0]
    places = r"(?<![\w.])/[\w./-]*/"
    return f"{type(error).__name__}: {re.sub(places, '', text)}"


def table(model: str, found: dict[str, Any]) -> str:
    """A line a contestant: medians (spread), and each as a share."""
    columns = ["decode tokens/s", "of torch", "prefill tokens/s", "of torch", "folder MB", "of f32", "peak MB"]
    rows = [[model, *columns, "of torch", "of f32", "same tokens"]]
    for name, row in found.items():
        if "missing" in row:
            continue
        speeds = []
        for what in ("decode", "prefill"):
            speeds.append(f"{row[f'{what}_median']:.1f} ({min(row[what]):.1f}-{max(row[what]):.1f})")
            speeds.append(f"{row[f'{what}_of_torch']:.2f}")
        folder = [f"{row['folder_bytes'] / 1e6:.0f}", f"{row['folder_of_export']:.3f}"] if row["folder_bytes"] else "--"
        peak = [f"{row['peak_bytes'] / 1e6:.0f}", f"{row['peak_of_torch']:.2f}", f"{row['peak_of_export']:.2f}"]
        rows.append([name, *speeds, *folder, *peak, str(row["same_tokens"])])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines += [f"{name}: none, {row['missing']}" for name, row in found.items() if "missing" in row]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", type=Path, nargs="+", help="a .gguf file or a folder, each")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    for name, default in COUNTS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    peers = [name for name, contestant in CONTESTANTS.items() if contestant.peer]
    parser.add_argument("--without", nargs="*", choices=peers, default=[], help="peers that memory has no room for")
    parser.add_argument("--json", type=Path, dest="file", help="where to write the numbers")
    options = parser.parse_args()
    made_on = environment()
    made_on["versions"] |= {name: version(name) for name in ("onnx", "onnxruntime")}
    settings = {name: getattr(options, name) for name in ("threads", *COUNTS, "without")}
    result: dict[str, Any] = {"environment": made_on, **settings, "models": {}}
    for model in options.models:
        with tempfile.TemporaryDirectory() as place:
            found = measure(model, Path(place), options)
        result["models"][model.name] = found
        print(table(model.name, found), flush=True)
    if options.file:
        options.file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
