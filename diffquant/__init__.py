"""Low-bit quantization, evaluation and export of Differential Transformer language models.

    import diffquant
    diffquant.quantize("checkpoint", "checkpoint-4bit", {"weights": "4:g32", "kv": 8})
    model = diffquant.load("checkpoint-4bit")

Make: `quantize`, `convert`, `search`, `calibrate`. Measure: `evaluate`, `sweep`, `compare`, `outliers`,
`fidelity`, `report`, `bench`. Run: `load`, `load_tokenizer`, `generate`, `serve`, `export`, `verify`,
`run`. Look: `inspect`, `plan`, `doctor`, `demo`. A recipe is a `Recipe`, or anything that `Recipe.parse` reads; every
error is a `DiffQuantError`.

Importing the package does not import torch. Once it is imported, transformers' `AutoModelForCausalLM` opens every
folder that diffquant writes.
"""

import os
from typing import TYPE_CHECKING, Any

# Imported first: a clone without symbolic links lacks packages, and should say so before one is imported.
import diffquant.support.links  # noqa: F401
from diffquant.errors import DiffQuantError
from diffquant.quantization.auto_classes import register_with_transformers
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import Scheme
from diffquant.support.installation import __version__
from diffquant.support.progress import show_waiting
from diffquant.verbs import (
    bench,
    calibrate,
    compare,
    convert,
    demo,
    doctor,
    evaluate,
    export,
    fidelity,
    generate,
    inspect,
    outliers,
    plan,
    quantize,
    report,
    run,
    search,
    serve,
    sweep,
    verify,
)

if TYPE_CHECKING:
    from diffquant.checkpoints.tokenizer import load_tokenizer
    from diffquant.quantization.loading import load

__all__ = [
    "DiffQuantError",
    "Recipe",
    "Scheme",
    "__version__",
    "bench",
    "calibrate",
    "compare",
    "convert",
    "demo",
    "doctor",
    "evaluate",
    "export",
    "fidelity",
    "generate",
    "inspect",
    "load",
    "load_tokenizer",
    "outliers",
    "plan",
    "quantize",
    "report",
    "run",
    "search",
    "serve",
    "sweep",
    "verify",
]


if not TYPE_CHECKING:  # A type checker that sees this would accept any name.

    def __getattr__(name: str) -> Any:
        if name == "load":
            with show_waiting("diffquant: importing torch and transformers ..."):
                from diffquant.quantization.loading import load

            return load
        if name == "load_tokenizer":
            from diffquant.checkpoints.tokenizer import load_tokenizer

            return load_tokenizer
        raise AttributeError(f"module 'diffquant' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


register_with_transformers()
# Since 1.29, ONNX Runtime sends telemetry unless this is set when it is first imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
