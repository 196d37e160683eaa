"""The recipe that a quantized checkpoint records in its config.json, and the dtype that its model runs in."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from diffquant.errors import CheckpointError, UsageError
from diffquant.recipe import Recipe
from diffquant.recipe.targets import LAYER_TARGETS, target_of
from diffquant.scheme import Scheme
from diffquant.support.devices import DTYPES
from diffquant.support.version import CONFIG_VERSION


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


def with_stored(recipe: Recipe, stored: Recipe) -> tuple[Recipe, tuple[str, ...]]:
    """A recipe for a checkpoint that records one of its cache and logits already.

    Returns:
        The recipe, with the stored scheme for each target that it does not mention, and notes for people: which stored
        schemes are kept, and which are replaced.
    """
    carried: list[str] = []
    notes: list[str] = []
    for target in LAYER_TARGETS:
        old, new = _of_target(stored, target), _of_target(recipe, target)
        if old == _of_target(Recipe(), target) or old == new:
            continue
        if new == _of_target(Recipe(), target):
            scheme, overrides = old
            changes: dict[str, Any] = {target: scheme, "overrides": {**recipe.overrides, **overrides}}
            recipe = replace(recipe, **changes)
            carried.append(target)
        else:
            notes.append(f"{_text(recipe, target)} replaces the source's {_text(stored, target)}")
    residual = f"residual {stored.residual}"
    if stored.residual and not recipe.residual and {"k", "v"} & set(carried):
        recipe = replace(recipe, residual=stored.residual)
        carried.append(residual)
    elif stored.residual and stored.residual != recipe.residual:
        notes.append(f"residual {recipe.residual} replaces the source's {residual}")
    if carried:
        said = [_text(recipe, name) if name in LAYER_TARGETS else name for name in carried]
        notes.insert(
            0,
            f"the source's recipe goes along where this one has 16 bits: {', '.join(said)}; an override such as "
            f"'*.{carried[0]}=16' takes its place",
        )
    return recipe, tuple(notes)


def _of_target(recipe: Recipe, target: str) -> tuple[Scheme, dict[str, Scheme]]:
    """A target's scheme and its overrides by layer."""
    own = {pattern: scheme for pattern, scheme in recipe.overrides.items() if target_of(pattern) == target}
    return getattr(recipe, target), own


def _text(recipe: Recipe, target: str) -> str:
    scheme, overrides = _of_target(recipe, target)
    return ", ".join([f"{target} {scheme}", *(f"{pattern} {own}" for pattern, own in overrides.items())])


def stored_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype in which a quantized checkpoint's model runs, or None if the tensors' dtype decides.

    Raises:
        CheckpointError: models cannot run in it.
    """
    entry = config.get("diffquant_config")
    name = entry.get("dtype") if isinstance(entry, Mapping) else None
    if name is not None and (not isinstance(name, str) or name not in DTYPES):
        raise CheckpointError(f"config.json: diffquant_config has dtype {name!r}; known are {', '.join(DTYPES)}")
    return None if name is None else DTYPES[name]
