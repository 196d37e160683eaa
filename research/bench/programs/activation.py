"""Decoding of an exported Motif beside an exported DiffLlama of the same sizes: what PolyNorm costs.

    python -m research.bench.programs.activation --json bench/results/motif-decode.json

Both are random, of 4-bit weights, open in one process, and take turns. They differ in the MLP's activation, in the
per-pair norm's weight and in nothing else that takes time.
"""

import json
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from safetensors.torch import save_file

from diffquant.benchmarks.measuring import environment, run_in_turns
from diffquant.model.adapters import adapter_for
from diffquant.onnx import native
from research.bench.programs.engines import open_export, write_export
from tests.support.apart import CORES, JsonFile, Threads, tell

SIZES: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 1024,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "DiffLlama": SIZES | {"model_type": "diffllama"},
    "Motif": SIZES | {"model_type": "motif", "hidden_act": "poly_norm"},
}
PROMPT, NEW = 64, 96


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """A random float32 checkpoint; norms are one, anything else is normal with a deviation of 0.05."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape) if "norm" in name else torch.randn(shape, generator=generator) * 0.05
        for name, shape in adapter_for(config).source_shapes().items()
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def measure(threads: int, repeats: int) -> dict[str, Any]:
    """Speeds of both models, in turns, and the median of the turns' ratios."""
    engines = {}
    with tempfile.TemporaryDirectory() as place:
        for name, config in CONFIGS.items():
            model = write_model(Path(place) / name, config)
            exported = Path(place) / f"{name}-onnx"
            write_export({"weights": "4:g32"}, model, exported)
            engines[name] = open_export(exported, threads)
        prompt = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (1, PROMPT))
        # The first turn warms up.
        turns = run_in_turns(
            {name: partial(engine.decode, prompt, NEW) for name, engine in engines.items()}, repeats + 1
        )
    speeds = {name: [speed for speed, _ in of_model[1:]] for name, of_model in turns.items()}
    pairs = zip(speeds["Motif"], speeds["DiffLlama"], strict=True)
    return {
        "tokens_per_second": speeds,
        "median": {name: median(of_model) for name, of_model in speeds.items()},
        "motif_of_diffllama": median(motif / diffllama for motif, diffllama in pairs),
    }


def main(
    threads: Threads = CORES,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each model.")] = 15,
    file: JsonFile = None,
) -> None:
    """Measure decoding of an exported Motif beside an exported DiffLlama of the same sizes."""
    settings = {
        "threads": threads,
        "repeats": repeats,
        "prompt": PROMPT,
        "new": NEW,
        "weights": "4:g32",
        "sizes": SIZES,
    }
    result = {
        "environment": environment("onnx", "onnxruntime"),
        "settings": settings | {"native_kernel": native.library_path() is not None},
        **measure(threads, repeats),
    }
    tell(result, file, f"{json.dumps(result['median'])} ratio {result['motif_of_diffllama']:.3f}")


if __name__ == "__main__":
    from diffquant.support.program import run_program

    run_program(main)
