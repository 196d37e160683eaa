"""Versions of the packages that determine an output."""

import importlib.metadata

import torch

from diffquant.support.version import __version__


def versions() -> dict[str, str]:
    """Versions of diffquant and torch by name."""
    return {"diffquant": __version__, "torch": torch.__version__}


def versions_of_run(device: str) -> dict[str, str]:
    """Versions of everything that computes a model's output on a device."""
    kernels = ("triton", "flash-attn") if torch.device(device).type == "cuda" else ()
    return versions() | {name: _installed(name) for name in ("transformers", *kernels)}


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
