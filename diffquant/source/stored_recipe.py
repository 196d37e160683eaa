"""The recipe that a quantized checkpoint records in its config.json, and the dtype that its model runs in."""

from collections.abc import Mapping
from typing import Any

import torch

from diffquant.errors import CheckpointError, UsageError
from diffquant.recipe import Recipe
from diffquant.support.devices import DTYPES
from diffquant.support.versions import CONFIG_VERSION


def stored_recipe(config: Mapping[str, Any]) -> Recipe:
    """The recipe that a quantized checkpoint was made with; 16 bits for any other checkpoint.

    Raises:
        CheckpointError: it cannot be read, or a newer diffquant wrote it.
    """
    entry = config.get("diffquant_config", {})
    try:
        if entry.get("version", CONFIG_VERSION) > CONFIG_VERSION:
            raise CheckpointError(
                f"config.json: diffquant_config has version {entry['version']}, this diffquant reads "
                f"{CONFIG_VERSION}; install a newer one"
            )
        return Recipe.from_dict(entry.get("recipe", {}))
    except (UsageError, AttributeError, TypeError) as error:
        raise CheckpointError(f"config.json: diffquant_config is malformed: {error}") from error


def stored_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that a quantized checkpoint's model runs in; None where it is that of the tensors.

    Raises:
        CheckpointError: it is none that models run in.
    """
    entry = config.get("diffquant_config")
    name = entry.get("dtype") if isinstance(entry, Mapping) else None
    if name is not None and (not isinstance(name, str) or name not in DTYPES):
        raise CheckpointError(f"config.json: diffquant_config has dtype {name!r}; known are {', '.join(DTYPES)}")
    return None if name is None else DTYPES[name]
