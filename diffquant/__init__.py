"""Low-bit quantization, evaluation and export of Differential Transformer language models.

    import diffquant
    diffquant.quantize("checkpoint", "checkpoint-4bit", {"weights": "4:g32", "kv": 8})
    model = diffquant.load("checkpoint-4bit")

Make: `quantize`, `convert`, `search`, `calibrate`. Measure: `evaluate`, `sweep`, `compare`, `fidelity`. Run: `load`,
`load_tokenizer`, `generate`, `export`. Recipes are `Recipe`s, or what `Recipe.parse` reads; every error is a
`DiffQuantError`.

Names are resolved when first used, so that importing the package does not import torch. Once it is imported,
transformers' `AutoModelForCausalLM` opens every folder that diffquant writes.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from diffquant.auto_classes import register_with_transformers
from diffquant.support.version import __version__

if TYPE_CHECKING:
    from diffquant.conversion import convert
    from diffquant.errors import DiffQuantError
    from diffquant.loading import load
    from diffquant.quantization.quantize import quantize
    from diffquant.recipe import Recipe
    from diffquant.scheme import Scheme
    from diffquant.source.tokenizer import load_tokenizer
    from diffquant.sweep.compare import compare
    from diffquant.verbs.calibrate import calibrate
    from diffquant.verbs.evaluate import evaluate
    from diffquant.verbs.export import export
    from diffquant.verbs.fidelity import fidelity
    from diffquant.verbs.generate import generate
    from diffquant.verbs.search import search
    from diffquant.verbs.sweep import sweep

_HOMES = {
    "calibrate": "diffquant.verbs.calibrate",
    "compare": "diffquant.sweep.compare",
    "convert": "diffquant.conversion",
    "evaluate": "diffquant.verbs.evaluate",
    "export": "diffquant.verbs.export",
    "fidelity": "diffquant.verbs.fidelity",
    "generate": "diffquant.verbs.generate",
    "load": "diffquant.loading",
    "load_tokenizer": "diffquant.source.tokenizer",
    "quantize": "diffquant.quantization.quantize",
    "search": "diffquant.verbs.search",
    "sweep": "diffquant.verbs.sweep",
    "DiffQuantError": "diffquant.errors",
    "Recipe": "diffquant.recipe",
    "Scheme": "diffquant.scheme",
}
# Verbs whose names are those of rooms too.
_ROOMS = ("export", "sweep")

__all__ = [
    "DiffQuantError",
    "Recipe",
    "Scheme",
    "__version__",
    "calibrate",
    "compare",
    "convert",
    "evaluate",
    "export",
    "fidelity",
    "generate",
    "load",
    "load_tokenizer",
    "quantize",
    "search",
    "sweep",
]


if not TYPE_CHECKING:  # A type checker that saw it would take any name for one of ours.

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'diffquant' has no attribute {name!r}")
        # Python makes a room an attribute of the package once it is imported: until then it is imported here.
        return import_module(f"{__name__}.{name}") if name in _ROOMS else _resolve(name)


def __dir__() -> list[str]:
    return sorted(__all__)


def _resolve(name: str) -> Any:
    return getattr(import_module(_HOMES[name]), name)


class _Room(ModuleType):
    """A room that is called as the verb of its name: `diffquant.sweep` has modules, and `diffquant.sweep(...)` runs."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    @property
    def __wrapped__(self) -> Any:
        """The verb; `help`, `inspect.signature` and notebooks look for it under this name."""
        return _resolve(self.__name__.rpartition(".")[2])


class _Package(ModuleType):
    """This package, which makes the rooms that are verbs callable as they come."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _ROOMS and isinstance(value, ModuleType):
            value.__class__ = _Room
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
register_with_transformers()
