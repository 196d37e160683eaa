"""Versions of what determines an output."""

import importlib.metadata

import torch


def versions() -> dict[str, str]:
    return {"diffquant": importlib.metadata.version("diffquant"), "torch": torch.__version__}
