"""Peers that continue tokens: transformers' own exports, onnxruntime-genai, llama.cpp and its llama-bench.

A library is imported where it is used: a process that runs without it must not pay its memory.
"""

import json
import resource
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from diffquant.errors import CheckpointError, MissingDependencyError
from research.bench.programs.engines import Engine, Step, counts_cpu_seconds, now, random_tokens, stepping, timed

# A scale over 32 weights, int8 activations in products and the last position's logits, as our 4-bit export has them;
# the head's codes serve the embedding, too.
_GENAI_OPTIONS = ("block_size=32", "accuracy_level=4", "prune_lm_head=true")
# The file that llama-cpp-python and llama-bench open.
_GGUF = "model.gguf"


def write_transformers(fusions: str | None, model: Path, folder: Path) -> None:
    """Write transformers' own export: one graph that takes prompts as well as single tokens."""
    import torch
    from transformers.exporters import ExportedModel, OnnxConfig, OnnxExporter

    opened = _opened_by_transformers(model)
    ids = torch.from_numpy(random_tokens(model, 16))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    config = OnnxConfig(dynamic=True, ort_fusions=fusions)
    with redirect_stdout(sys.stderr):  # its progress is not our table
        exported = OnnxExporter().export_for_generation(opened, inputs, config, multi_token_decode=True)
    graph = {"decode": exported.components["decode"]}
    ExportedModel(graph, exported.export_format, config=exported.config).save_pretrained(folder)


def _opened_by_transformers(model: Path) -> Any:
    """A model in float32 as transformers reads it, a GGUF file dequantized."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import GgufConfig

    gguf = {"gguf_file": model.name, "quantization_config": GgufConfig(dequantize=True)} if model.is_file() else {}
    place = model.parent if gguf else model
    return AutoModelForCausalLM.from_pretrained(place, **gguf, dtype=torch.float32, local_files_only=True).eval()


def open_transformers(folder: Path, threads: int) -> Engine:
    """Engine of transformers' export; a call's cache is the next one's input without a copy, and grows by a copy."""
    import onnxruntime as ort

    from diffquant.onnx.runtime.session import session_options

    options = session_options(threads, native=False)
    session = ort.InferenceSession(str(folder / "decode.onnx"), options, providers=["CPUExecutionProvider"])
    caches = [value for value in session.get_inputs() if "past_key_values" in value.name]

    def start(batch: int, _: int) -> Step:
        shapes = [(batch, int(value.shape[1]), 0, int(value.shape[3])) for value in caches]
        past = [ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, np.float32)) for shape in shapes]
        length = 0

        def step(ids: np.ndarray) -> np.ndarray:
            nonlocal past, length
            binding = session.io_binding()
            binding.bind_cpu_input("input_ids", ids)
            places = np.arange(length, length + ids.shape[1])[None].repeat(batch, 0)
            binding.bind_cpu_input("position_ids", places)
            for value, cache in zip(caches, past, strict=True):
                binding.bind_ortvalue_input(value.name, cache)
            for output in session.get_outputs():
                binding.bind_output(output.name, "cpu")
            session.run_with_iobinding(binding)
            logits, *past = binding.get_outputs()
            length += ids.shape[1]
            return np.asarray(logits.numpy())

        return step

    return stepping(start, lambda: "ONNX Runtime's")


def write_genai(model: Path, folder: Path) -> None:
    """Write what onnxruntime-genai's model builder makes of a model in int4.

    Raises:
        MissingDependencyError: onnxruntime-genai is not installed.
        CheckpointError: its builder failed.
    """
    from diffquant.checkpoints.tokenizer import load_tokenizer

    package = find_spec("onnxruntime_genai")
    if package is None or package.submodule_search_locations is None:
        raise MissingDependencyError("onnxruntime-genai is not installed")
    builder = Path(package.submodule_search_locations[0]) / "models" / "builder.py"
    with TemporaryDirectory() as place:
        source = Path(place) / "model"
        _opened_by_transformers(model).save_pretrained(source)
        load_tokenizer(model).save_pretrained(source)
        command = [sys.executable, str(builder), "-i", str(source), "-o", str(folder), "-p", "int4", "-e", "cpu"]
        command += ["-c", str(Path(place) / "cache"), "--extra_options", *_GENAI_OPTIONS, "hf_token=false"]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        raise CheckpointError(f"onnxruntime-genai's builder ended with {made.returncode}: {made.stderr.strip()[-200:]}")


def open_genai(folder: Path, threads: int) -> Engine:
    """Engine of onnxruntime-genai's own loop, with its cache in place."""
    import onnxruntime_genai as genai

    config = genai.Config(str(folder))
    options = {"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}
    config.overlay(json.dumps(options))
    model = genai.Model(config)

    def start(prompts: np.ndarray, count: int) -> Any:
        parameters, rows = genai.GeneratorParams(model), prompts.shape[1] + count
        # No end before its time: everyone generates the same count.
        parameters.set_search_options(min_length=rows, max_length=rows, do_sample=False, batch_size=len(prompts))
        generator = genai.Generator(model, parameters)
        generator.append_tokens(prompts.astype(np.int32).flatten())
        return generator

    def generate(prompts: np.ndarray, count: int) -> tuple[list[int], list[float]]:
        generator = start(prompts, count)
        tokens, times = [], []
        for _ in range(count):
            generator.generate_next_token()
            tokens.append(int(generator.get_next_tokens()[0]))
            times.append(now())
        return tokens, times

    def run(prompts: np.ndarray) -> Any:
        start(prompts, 1)

    return timed(generate, run, lambda: "ONNX Runtime's", {"builder options": "int4, " + ", ".join(_GENAI_OPTIONS)})


def write_llama_cpp(model: Path, folder: Path) -> None:
    """Write a GGUF file in llama.cpp's Q4_0 by its own quantizer, also of a file that is quantized already.

    Raises:
        CheckpointError: the model is no GGUF file, or llama.cpp could not quantize it.
    """
    import llama_cpp

    if model.suffix != ".gguf":
        raise CheckpointError("llama.cpp opens GGUF files of architectures it knows, which no DIFF model is")
    folder.mkdir()
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    options.allow_requantize = True
    source, target = str(model).encode(), str(folder / _GGUF).encode()
    if llama_cpp.llama_model_quantize(source, target, options):
        raise CheckpointError(f"llama.cpp could not quantize {model}")


def open_llama_cpp(folder: Path, threads: int) -> Engine:
    """Engine of llama.cpp as llama-cpp-python sets it up, giving logits of every position as the others do."""
    import llama_cpp

    about = {"system": llama_cpp.llama_print_system_info().decode().strip()}
    model = llama_cpp.Llama(
        str(folder / _GGUF),
        n_ctx=2048,
        n_threads=threads,
        n_threads_batch=threads,
        logits_all=True,
        verbose=False,
    )

    def start(_batch: int, _rows: int) -> Step:
        model.reset()

        def step(ids: np.ndarray) -> np.ndarray:
            model.eval(ids[0].tolist())
            return np.asarray(model.scores[None, model.n_tokens - 1 : model.n_tokens])

        return step

    return stepping(start, lambda: "llama.cpp's", about, takes_batches=False)


def open_llama_bench(folder: Path, threads: int) -> Engine:
    """Engine of llama.cpp's own llama-bench, a process for each turn, which warms up and loads before it times.

    Several sequences at once are llama-batched-bench's, where that is on the path, too.

    Raises:
        MissingDependencyError: no program of that name is on the path.
    """
    batched = shutil.which("llama-batched-bench")
    program = shutil.which("llama-bench")
    if program is None:
        raise MissingDependencyError("llama-bench is not on the path")
    flags = ["-t", str(threads), "-r", "1"]

    def run(*test: str) -> float:
        command = [program, "-m", str(folder / _GGUF), *flags, *test, "-o", "json"]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
        (entry,) = json.loads(ran.stdout)
        return float(entry["avg_ts"])

    def cpu_seconds(*test: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run(*test)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def run_batch(prompts: np.ndarray, count: int) -> dict[str, float]:
        sequences, tokens = prompts.shape
        sizes = {"-npp": tokens, "-ntg": count, "-npl": sequences, "-c": sequences * (tokens + count), "-t": threads}
        command = [batched or "", "-m", str(folder / _GGUF), "--output-format", "jsonl"]
        command += [str(part) for size in sizes.items() for part in size]
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
        (entry,) = (json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{"))
        return dict(entry)

    # A process tells its seconds with those of loading and warming up: what more of the same takes has none.
    def decode(prompt: np.ndarray, count: int) -> tuple[float, list[int]]:
        if len(prompt) > 1:
            return run_batch(prompt, count)["speed_tg"], []
        start = ("-p", "0", "-d", str(prompt.shape[1]), "-n")
        if not counts_cpu_seconds():
            return run(*start, str(count)), []
        return count / (cpu_seconds(*start, str(2 * count)) - cpu_seconds(*start, str(count))), []

    def prefill(prompt: np.ndarray) -> float:
        if len(prompt) > 1:
            return run_batch(prompt, 1)["speed_pp"]
        test = ("-p", str(prompt.shape[1]), "-n", "0")
        if not counts_cpu_seconds():
            return run(*test)
        return 2 * int(prompt.shape[1]) / (cpu_seconds(*test, "-r", "3") - cpu_seconds(*test))

    about = {"flags": " ".join(flags) + " -p 0 -n NEW -d PROMPT, or -p PREFILL -n 0"}
    # Its batches tell the clock's seconds alone.
    takes_batches = batched is not None and not counts_cpu_seconds()
    return Engine(decode, prefill, lambda: "llama.cpp's", about, elsewhere=True, takes_batches=takes_batches)
