"""Engines that continue tokens: DiffTransformer, our exports in ONNX Runtime, transformers' own exports, llama.cpp.

torch is imported where it is used: a process that runs without it must not pay its memory.
"""

import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from diffquant import export
from diffquant.errors import CheckpointError

# From tokens [1, T] to the logits of some of them, the last one's among them: [1, T or 1, V].
Step = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Engine:
    """An open model that continues tokens.

    Attributes:
        generate: function of a prompt [1, T] and a count; gives so many new tokens and the time of each.
        prefill: function that runs a prompt [1, T] alone.
    """

    generate: Callable[[np.ndarray, int], tuple[list[int], list[float]]]
    prefill: Callable[[np.ndarray], Any]


def stepping(start: Callable[[int], Step]) -> Engine:
    """Engine that decodes greedily by a step; `start` makes one with room for so many tokens."""

    def generate(prompt: np.ndarray, count: int) -> tuple[list[int], list[float]]:
        step, ids = start(prompt.shape[1] + count), prompt
        tokens, times = [], []
        for _ in range(count):
            tokens.append(int(step(ids)[0, -1].argmax()))
            times.append(time.perf_counter())
            ids = np.array([tokens[-1:]])
        return tokens, times

    return Engine(generate, lambda prompt: start(prompt.shape[1])(prompt))


def open_torch(model: Path, threads: int) -> Engine:
    """Engine of DiffTransformer, through transformers' `generate`."""
    import torch

    from diffquant.loading import load

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


def write_export(options: dict[str, Any], model: Path, folder: Path) -> None:
    """Write diffquant's export; a model without a tokenizer is calibrated on random tokens."""
    import torch

    from diffquant.calib.calibration.kv_cache import calibrate_cache
    from diffquant.recipe import Recipe

    export.require()
    parsed = export.ExportOptions.parse(**options)
    ranges = None
    if parsed.kv_bits < 16:
        has_text = model.is_file() or (model / "tokenizer.json").is_file()
        ids = None if has_text else torch.from_numpy(random_tokens(model, 64))
        ranges = calibrate_cache(model, Recipe(weights=parsed.weights, logits=parsed.logits), ids)
    export.export(model, folder, parsed, ranges=ranges)


def open_export(folder: Path, threads: int) -> Engine:
    """Engine of diffquant's export, with a cache that is extended in place."""
    from diffquant.export.runtime.session import InPlaceDecoder, OnnxModel

    model = OnnxModel(folder, threads)
    return stepping(lambda rows: InPlaceDecoder(model, 1, rows).step)


def write_transformers(fusions: str | None, bits: int, model: Path, folder: Path) -> None:
    """Write transformers' own export: one graph that takes prompts as well as single tokens.

    Its 4 bits are NNCF's: symmetric, a scale over 32 weights, embedding and head at 8 bits.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.exporters import ExportedModel, OnnxConfig, OnnxExporter
    from transformers.utils.quantization_config import GgufConfig

    gguf = {"gguf_file": model.name, "quantization_config": GgufConfig(dequantize=True)} if model.is_file() else {}
    place = model.parent if gguf else model
    opened = AutoModelForCausalLM.from_pretrained(place, **gguf, dtype=torch.float32, local_files_only=True).eval()
    ids = torch.from_numpy(random_tokens(model, 16))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    config = OnnxConfig(dynamic=True, ort_fusions=fusions, quantizer=_nncf_quantizer() if bits == 4 else None)
    with redirect_stdout(sys.stderr):  # its progress is not our table
        exported = OnnxExporter().export_for_generation(opened, inputs, config, multi_token_decode=True)
    graph = {"decode": exported.components["decode"]}
    ExportedModel(graph, exported.export_format, config=exported.config).save_pretrained(folder)


def _nncf_quantizer() -> Any:
    import nncf
    from transformers.exporters import NNCFOnnxQuantizer, NNCFWeightCompressionConfig

    return NNCFOnnxQuantizer(NNCFWeightCompressionConfig(mode=nncf.CompressWeightsMode.INT4_SYM, group_size=32))


def open_transformers(folder: Path, threads: int) -> Engine:
    """Engine of transformers' export; a call's cache is the next one's input without a copy, and grows by a copy."""
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
    source, target = str(model).encode(), str(folder / "model.gguf").encode()
    if llama_cpp.llama_model_quantize(source, target, options):
        raise CheckpointError(f"llama.cpp could not quantize {model}")


def open_llama_cpp(folder: Path, threads: int) -> Engine:
    """Engine of llama.cpp as llama-cpp-python sets it up, giving logits of every position as the others do."""
    import llama_cpp

    model = llama_cpp.Llama(
        str(folder / "model.gguf"),
        n_ctx=2048,
        n_threads=threads,
        n_threads_batch=threads,
        logits_all=True,
        verbose=False,
    )

    def start(_: int) -> Step:
        model.reset()

        def step(ids: np.ndarray) -> np.ndarray:
            model.eval(ids[0].tolist())
            return np.asarray(model.scores[None, model.n_tokens - 1 : model.n_tokens])

        return step

    return stepping(start)


def random_tokens(model: Path, count: int) -> np.ndarray:
    """Token ids [1, count], the same every time; speed does not depend on what they say."""
    from diffquant.formats.opening import open_checkpoint

    return np.random.default_rng(0).integers(0, open_checkpoint(model).config["vocab_size"], (1, count))
