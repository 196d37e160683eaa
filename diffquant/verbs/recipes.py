"""The recipe that a verb's parameters make."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from diffquant.errors import UsageError
from diffquant.recipe import Recipe, RecipeLike
from diffquant.recipe.presets import LIKE, PRESETS
from diffquant.recipe.rounding import NEAREST
from diffquant.support.listing import repeated
from diffquant.support.spelling import spelled
from diffquant.verbs.notes import say

if TYPE_CHECKING:
    from diffquant.source.source import Source
    from diffquant.source.weight_source import WeightSource


def chosen_recipe(
    recipe: RecipeLike | None = None, preset: str | None = None, *, like: str | None = None, **settings: Any
) -> Recipe | None:
    """The recipe that is given whole, by a preset's name or by its settings; None if nothing is given.

    Args:
        like: name of a published kernel, whose operands of attention go with a preset or with settings; a setting for
            the same operand takes its place.
        settings: what `Recipe.of` takes; None is not given, and overrides may be "PATTERN=SCHEME" texts.

    Raises:
        UsageError: more than one of the three is given, or one cannot be read.
    """
    if like is not None and like not in LIKE:
        raise UsageError(f"unknown kernel {like!r} to be like; known are {', '.join(LIKE)}")
    operands = {} if like is None else LIKE[like]
    stated = {name: value for name, value in settings.items() if value is not None and value != ()}
    whole = [name for name, given in (("recipe", recipe), ("preset", preset)) if given is not None]
    if len(whole) == 2:
        raise UsageError(f"{spelled('recipe')} and {spelled('preset')} are two recipes; give one or the other")
    if recipe is not None and like is not None:
        raise UsageError(
            f"{spelled('recipe')} says all of itself; write {spelled('like', like)}'s operands into it: "
            + ", ".join(f"{target} {scheme}" for target, scheme in operands.items())
        )
    if whole and stated:
        raise UsageError(f"{spelled(whole[0])} replaces {', '.join(map(spelled, stated))}; give one or the other")
    if preset is not None:
        if preset not in PRESETS:
            raise UsageError(f"unknown preset {preset!r}; known are {', '.join(PRESETS)}")
        return Recipe.of(**PRESETS[preset], **operands)
    if recipe is not None:
        return Recipe.parse(recipe)
    if "overrides" in stated:
        stated["overrides"] = _overrides(stated["overrides"])
    return Recipe.of(**{**operands, **stated}) if operands or stated else None


def _overrides(given: Mapping[str, str] | Sequence[str]) -> Mapping[str, str]:
    if isinstance(given, Mapping):
        return given
    stated = [_override(text) for text in ([given] if isinstance(given, str) else given)]
    if twice := repeated(pattern for pattern, _ in stated):
        raise UsageError(f"{spelled('overrides')} has {', '.join(map(repr, twice))} twice; keep one of each")
    return dict(stated)


def _override(text: str) -> tuple[str, str]:
    pattern, separator, scheme = text.partition("=")
    if not separator or not pattern:
        raise UsageError(f"cannot read override {text!r}: expected PATTERN=SCHEME, such as '*.mlp.*=6:row'")
    return pattern, scheme


def with_a_rule_that_can(source: "Source | WeightSource", recipe: Recipe) -> Recipe:
    """A recipe by the default rule, or by nearest where that cannot do its schemes, which is said."""
    from diffquant.quantization.roundings import checked_rounding
    from diffquant.quantization.targets import targets_of

    schemes = {} if source.packed else targets_of(source).schemes(recipe)
    if not schemes:
        return replace(recipe, rounding=NEAREST)
    try:
        checked_rounding(recipe.rounding, schemes)
    except UsageError as error:
        if recipe.rounding.reads:
            raise
        say(f"note: rounds by nearest, since {error}")
        return replace(recipe, rounding=NEAREST)
    return recipe
