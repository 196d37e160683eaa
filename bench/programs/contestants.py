"""Who generates in the bench, and the settings that all share."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from diffquant.bench.programs.engines import Engine, open_export, open_torch, write_export
from diffquant.bench.programs.peer_engines import (
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
