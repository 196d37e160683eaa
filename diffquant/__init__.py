"""Low-bit quantization, evaluation and export of Differential Transformer language models.

    import diffquant
    diffquant.quantize("checkpoint", "checkpoint-4bit", {"weights": "4:g32", "kv": 8})
    model = diffquant.load("checkpoint-4bit")

Make: `quantize`, `convert`, `search`, `calibrate`. Measure: `evaluate`, `sweep`, `compare`, `outliers`,
`attention_map`, `fidelity`, `report`, `bench`. Run: `load`, `load_tokenizer`, `generate`, `serve`, `export`, `verify`,
`run`. Look: `inspect`, `plan`, `doctor`, `demo`. Recipes are `Recipe`s, or what `Recipe.parse` reads; every error is a
`DiffQuantError`.

Importing the package does not import torch. Once it is imported, transformers' `AutoModelForCausalLM` opens every
folder that diffquant writes.
"""

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from diffquant import verbs as _verbs
from diffquant.auto_classes import register_with_transformers
from diffquant.errors import DiffQuantError
from diffquant.recipe import Recipe
from diffquant.scheme import Scheme
from diffquant.support.links import require_links
from diffquant.support.progress import waiting
from diffquant.support.version import __version__
from diffquant.verbs import (
    attention_map,
    calibrate,
    compare,
    convert,
    evaluate,
    fidelity,
    generate,
    inspect,
    outliers,
    plan,
    quantize,
    run,
    search,
    verify,
)

if TYPE_CHECKING:
    from diffquant.loading import load
    from diffquant.source.tokenizer import load_tokenizer
    from diffquant.verbs import bench, demo, doctor, export, report, serve, sweep

__all__ = [
    "DiffQuantError",
    "Recipe",
    "Scheme",
    "__version__",
    "attention_map",
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


if not TYPE_CHECKING:  # A type checker that saw it would take any name for one of ours.

    def __getattr__(name: str) -> Any:
        if name == "load":
            with waiting("diffquant: importing torch and transformers ..."):
                from diffquant.loading import load

            return load
        if name == "load_tokenizer":
            from diffquant.source.tokenizer import load_tokenizer

            return load_tokenizer
        raise AttributeError(f"module 'diffquant' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


class _Room(ModuleType):
    """A room that is called as the verb of its name: `diffquant.sweep` has modules, and `diffquant.sweep(...)` runs.

    Attributes:
        __wrapped__: verb; `help`, `inspect.signature` and notebooks look for it under this name.
    """

    __wrapped__: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)


# A clone without symbolic links has no room of that name, and should say so.
require_links(Path(__file__).parent)
import diffquant.bench as _bench  # noqa: E402
import diffquant.demo as _demo  # noqa: E402
import diffquant.doctor as _doctor  # noqa: E402
import diffquant.export as _export  # noqa: E402
import diffquant.report as _report  # noqa: E402
import diffquant.serve as _serve  # noqa: E402
import diffquant.sweep as _sweep  # noqa: E402

for _room in (_bench, _demo, _doctor, _export, _report, _serve, _sweep):
    _room.__class__, vars(_room)["__wrapped__"] = _Room, getattr(_verbs, _room.__name__.rpartition(".")[2])

register_with_transformers()
# ONNX Runtime, since 1.29, reports to its makers what it runs, unless this is set when it is first imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
