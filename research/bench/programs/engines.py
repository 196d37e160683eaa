"""Engines that continue tokens: DiffTransformer and our exports in ONNX Runtime. Peers are in peer_engines.py.

torch is imported where it is used: a process that runs without it must not pay its memory.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from diffquant.onnx import check_installed
from diffquant.onnx.native import attention_instruction_set
from tests.support.native_kernels import count_attention_calls, count_matmul_calls, matmul_instruction_set

_clock = [time.perf_counter]

# From tokens [B, T] to the logits of some of them, the last ones' among them: [B, T or 1, V].
Step = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Engine:
    """An open model whose speed at continuing tokens can be measured.

    Attributes:
        decode: function of prompts [B, T] and a count; gives tokens a second of all sequences from the first new tokens
            to the last, and the first sequence's new tokens, none where the engine does not tell.
        prefill: function of prompts [B, T]; gives tokens a second of running them alone.
        kernels: function that names whose kernels have run.
        about: what a result must say of the engine, such as the flags it was built with.
        elsewhere: whether it runs in processes of its own, whose memory is then not known.
        takes_batches: whether it takes more than one sequence at once.
    """

    decode: Callable[[np.ndarray, int], tuple[float, list[int]]]
    prefill: Callable[[np.ndarray], float]
    kernels: Callable[[], str]
    about: Mapping[str, str] = field(default_factory=dict)
    elsewhere: bool = False
    takes_batches: bool = True


def timed(
    generate: Callable[[np.ndarray, int], tuple[list[int], list[float]]],
    run: Callable[[np.ndarray], Any],
    kernels: Callable[[], str],
    about: Mapping[str, str] | None = None,
    takes_batches: bool = True,
) -> Engine:
    """Engine that is timed from here.

    Args:
        generate: function of prompts and a count; gives so many new tokens of the first one and the time of each.
        run: function that runs prompts alone.
        kernels: function that names whose kernels have run.
        about: what a result must say of the engine.
        takes_batches: whether there may be several prompts.
    """

    def decode(prompts: np.ndarray, count: int) -> tuple[float, list[int]]:
        tokens, times = generate(prompts, count)
        return len(prompts) * (count - 1) / (times[-1] - times[0]), tokens

    def prefill(prompts: np.ndarray) -> float:
        started = now()
        run(prompts)
        return prompts.size / (now() - started)

    return Engine(decode, prefill, kernels, about or {}, takes_batches=takes_batches)


def stepping(
    start: Callable[[int, int], Step],
    kernels: Callable[[], str],
    about: Mapping[str, str] | None = None,
    takes_batches: bool = True,
) -> Engine:
    """Engine that decodes greedily by a step; `start` makes one for so many sequences with room for so many tokens."""

    def generate(prompts: np.ndarray, count: int) -> tuple[list[int], list[float]]:
        step, ids = start(len(prompts), prompts.shape[1] + count), prompts
        tokens, times = [], []
        for _ in range(count):
            ids = step(ids)[:, -1].argmax(-1)[:, None]
            times.append(now())
            tokens.append(int(ids[0, 0]))
        return tokens, times

    def run(prompts: np.ndarray) -> Any:
        return start(*prompts.shape)(prompts)

    return timed(generate, run, kernels, about, takes_batches)


def count_cpu_seconds() -> None:
    """Count this process's seconds on a processor from now on, in which what else busy cores do has no part."""
    _clock[0] = time.process_time


def counts_cpu_seconds() -> bool:
    """Whether this process counts its seconds on a processor."""
    return _clock[0] is time.process_time


def now() -> float:
    """Seconds of the clock that counts in this process."""
    return _clock[0]()


def open_torch(model: Path, threads: int) -> Engine:
    """Engine of DiffTransformer, through transformers' `generate`."""
    import torch

    from diffquant.quantization.loading import load

    torch.set_num_threads(threads)
    opened = load(model, dtype=torch.float32, device="cpu")
    opened.generation_config.eos_token_id = None  # everyone generates the same count

    def generate(prompts: np.ndarray, count: int) -> tuple[list[int], list[float]]:
        clock, ids = Clock(), torch.from_numpy(prompts)
        opened.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            streamer=clock,
            pad_token_id=0,
        )
        return clock.tokens[1:], clock.times[1:]

    @torch.inference_mode()
    def prefill(prompt: np.ndarray) -> Any:
        return opened(torch.from_numpy(prompt), use_cache=True, logits_to_keep=1).logits

    return timed(generate, prefill, lambda: f"torch's, {torch.backends.cpu.get_cpu_capability()}")


class Clock:
    """A streamer for transformers' `generate`; it is given the prompts first, which count as one token here."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []

    def put(self, ids: Any) -> None:
        # Of prompts [B, T] and of the tokens [B] after them.
        self.tokens.append(int(ids.flatten()[0]))
        self.times.append(now())

    def end(self) -> None: ...


def write_export(options: dict[str, Any], model: Path, folder: Path) -> None:
    """Write diffquant's export; a model without a tokenizer is calibrated on random tokens."""
    check_installed()
    import torch

    from diffquant.calib.calibration.kv_cache import calibrate_cache
    from diffquant.onnx import ExportOptions, export
    from diffquant.recipe import Recipe

    parsed = ExportOptions.parse(**options)
    ranges = None
    if parsed.kv_bits < 16:
        has_text = model.is_file() or (model / "tokenizer.json").is_file()
        ids = None if has_text else torch.from_numpy(random_tokens(model, 64))
        ranges = calibrate_cache(model, Recipe(weights=parsed.weights, logits=parsed.logits), ids)
    export(model, folder, parsed, ranges=ranges)


def open_export(folder: Path, threads: int, native: bool = True) -> Engine:
    """Engine of diffquant's export, by the native kernel or the function body; its cache is extended in place."""
    from diffquant.onnx.runtime.session import InPlaceDecoder, OnnxModel

    model = OnnxModel(folder, threads, native=native, device="cpu")
    return stepping(lambda batch, rows: InPlaceDecoder(model, batch, rows).step, export_kernels)


def export_kernels() -> str:
    """Whose kernels have computed exported models in this process: those of the native library that were called."""
    found = []
    if count_attention_calls():
        found.append(f"attention {attention_instruction_set()}")
    if count_matmul_calls():
        found.append(f"products {matmul_instruction_set()}")
    return f"diffquant's: {', '.join(found)}" if found else "ONNX Runtime's"


def random_tokens(model: Path, count: int) -> np.ndarray:
    """Token ids [1, count], the same every time; speed does not depend on what they say."""
    from diffquant.checkpoints.opening import open_checkpoint

    return np.random.default_rng(0).integers(0, open_checkpoint(model).config["vocab_size"], (1, count))
