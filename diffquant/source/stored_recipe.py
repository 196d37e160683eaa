"""The recipe that a quantized checkpoint records in its config.json."""

from collections.abc import Mapping
from typing import Any

from diffquant.errors import CheckpointError, UsageError
from diffquant.recipe import Recipe
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
