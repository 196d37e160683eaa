"""Versions of what determines an output."""

import importlib.metadata

import torch

# Of config.json's `diffquant_config`; a reader refuses what is newer than it knows.
CONFIG_VERSION = 1


def versions() -> dict[str, str]:
    return {"diffquant": importlib.metadata.version("diffquant"), "torch": torch.__version__}
