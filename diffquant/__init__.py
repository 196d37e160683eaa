"""Low-bit quantization, evaluation and export of Differential Transformer language models.

    import diffquant
    diffquant.quantize("checkpoint", "checkpoint-4bit", diffquant.Recipe.of(weights="4:g32", kv=8))
    model = diffquant.load("checkpoint-4bit")

Names are resolved when first used, so that importing the package does not import torch. Once it is imported,
transformers' `AutoModelForCausalLM` opens every folder that diffquant writes.
"""

from importlib import import_module
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

_HOMES = {
    "convert": "diffquant.conversion",
    "load": "diffquant.loading",
    "load_tokenizer": "diffquant.source.tokenizer",
    "quantize": "diffquant.quantization.quantize",
    "DiffQuantError": "diffquant.errors",
    "Recipe": "diffquant.recipe",
    "Scheme": "diffquant.scheme",
}

__all__ = ["DiffQuantError", "Recipe", "Scheme", "__version__", "convert", "load", "load_tokenizer", "quantize"]


if not TYPE_CHECKING:  # A type checker that saw it would take any name for one of ours.

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'diffquant' has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)


register_with_transformers()
