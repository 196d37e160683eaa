"""A verb's recipe: one argument in Python, and the options of the command line that make it."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from diffquant.errors import UsageError
from diffquant.recipe import Recipe, RecipeLike
from diffquant.recipe.presets import LIKE, PRESETS
from diffquant.recipe.rounding import NEAREST
from diffquant.recipe.scheme import Scheme
from diffquant.support.names import find_duplicates, option_name
from diffquant.support.progress import format_duration
from diffquant.verbs import kinds
from diffquant.verbs.notes import say

if TYPE_CHECKING:
    from diffquant.checkpoints.source import Source
    from diffquant.checkpoints.weight_source import WeightSource

# Options that name a recipe, or its operands, as a whole.
_WHOLE = ("recipe", "preset", "like")
# Seconds that a rule may take which reads a text, where no rule is asked for.
PATIENCE = 20 * 60
# Below this, a group's scale takes as many bits as its codes gain; such a weight has one scale per output channel.
SMALLEST_GROUP = 8


def recipe_of_options(
    *,
    recipe: kinds.RecipeFile | None = None,
    preset: kinds.Preset | None = None,
    weights: kinds.Scheme | None = None,
    kv: kinds.Scheme | None = None,
    k: kinds.Scheme | None = None,
    v: kinds.Scheme | None = None,
    logits: kinds.Scheme | None = None,
    qk: kinds.Scheme | None = None,
    p: kinds.Scheme | None = None,
    pv: kinds.Scheme | None = None,
    activations: kinds.Scheme | None = None,
    like: kinds.Kernel | None = None,
    residual: kinds.Residual | None = None,
    overrides: kinds.Overrides = (),
) -> RecipeLike | None:
    """Return the recipe that the command line's options give to a verb, as `Recipe.parse` reads it, or None.

    Args:
        recipe: YAML file of a recipe, in place of the schemes.
        preset: name of a recipe. int4: weights 4:g32, known as w4a16. int8: weights 8:row and a KV cache of 8 bits.
            w8a8, fp8, w4a8: weights 8:row, e4m3:row or 4:g32, and activations of 8 bits. kv-4bit-best: a KV cache of
            k 4:c32, v 4:row:rotated and residual 64. paper: logits 4:tensor, the fewest bits in the DIFF paper's
            Figure 8.
        weights: scheme of the weights, as FORMAT[:GRANULARITY]: 4:g32, 6:channel, nvfp4 or 16.
        kv: scheme of the KV cache: 8, 4:token, 4:g32 or 16.
        k: scheme of keys, in place of `kv`; 4:c64 has one scale per channel and 64 tokens.
        v: scheme of values, in place of `kv`.
        logits: scheme of attention logits, whose rounding is simulated: 6:row, 4:tensor, 4:row:shift or 16.
        qk: scheme of the queries and keys of Q·Kᵀ, whose rounding is simulated: 8:row, 4:b64:smooth or 16.
        p: scheme of softmax weights before their row's sum divides them, whose rounding is simulated: 8:row, e4m3:row,
            nvfp4 or 16.
        pv: scheme of the values that those weights multiply, beside that of the cache; simulated: e4m3:channel, nvfp4,
            8:g32 or 16.
        activations: scheme of the inputs of Linears whose weights are quantized, rounded per token while the model
            runs: 8, fp8, 4, nvfp4 or 16.
        like: published kernel whose qk, p and pv are taken, where they are not given: sage2 (int8 and FP8), sage2-int4,
            sage3 (NVFP4), fa3-fp8 or modelopt-nvfp4.
        residual: number of newest tokens of the KV cache that stay 16-bit; none by default.
        overrides: scheme for some weights, layers' .k, .v, .logits, .qk, .p and .pv, or weights' .activations:
            '*.mlp.*=6:row', '*.layers.3.*.k=8', '*.down_proj.activations=16'; the first match wins.

    Raises:
        UsageError: a recipe's file comes with a preset or settings, a preset with settings, or one cannot be read.
    """
    given = {**locals(), "overrides": _overrides(overrides) or None}
    stated = {name: each for name, each in given.items() if each is not None and name not in _WHOLE}
    kernel = {} if like is None else {"like": like}
    if recipe is not None and preset is not None:
        raise UsageError(f"{option_name('recipe')} and {option_name('preset')} are two recipes; give one or the other")
    if recipe is not None and like is not None:
        raise UsageError(
            f"{option_name('recipe')} says all of itself; write {option_name('like', like)}'s operands into it: "
            + ", ".join(f"{target} {scheme}" for target, scheme in LIKE.get(like, {}).items())
        )
    whole = "preset" if recipe is None else "recipe"
    if stated and not (recipe is None and preset is None):
        raise UsageError(f"{option_name(whole)} replaces {', '.join(map(option_name, stated))}; give one or the other")
    if recipe is not None:
        return recipe
    if preset is not None:
        if preset not in PRESETS:
            raise UsageError(f"unknown preset {preset!r}; known are {', '.join(PRESETS)}")
        return {**PRESETS[preset], **kernel} if kernel else preset
    return {**kernel, **stated} or None


def _overrides(given: Mapping[str, str] | Sequence[str]) -> Mapping[str, str]:
    if isinstance(given, Mapping):
        return given
    entries = [given] if isinstance(given, str) else given
    if unread := [text for text in entries if text.find("=") < 1]:
        raise UsageError(f"cannot read override {unread[0]!r}: expected PATTERN=SCHEME, such as '*.mlp.*=6:row'")
    stated = [(pattern, scheme) for pattern, _, scheme in (text.partition("=") for text in entries)]
    if twice := find_duplicates(pattern for pattern, _ in stated):
        raise UsageError(f"{option_name('overrides')} has {', '.join(map(repr, twice))} twice; keep one of each")
    return dict(stated)


def with_groups_that_fit(source: "Source | WeightSource", recipe: Recipe) -> Recipe:
    """Return a preset's recipe with smaller groups for weights whose width its group size does not divide."""
    from diffquant.quantization.targets import targets_of

    targets, smaller = targets_of(source), dict[str, Scheme]()
    for module, scheme in ({} if source.packed else targets.schemes(recipe)).items():
        width = source.checkpoint.tensors[targets.weights[module]].shape[-1]
        if scheme.size and width % scheme.size:
            pattern = re.sub(r"^.*?\.\d+\.", "*.", module)
            group = math.gcd(width, scheme.size)
            smaller[pattern] = Scheme.parse(f"{scheme.format.name}:{f'g{group}' if group >= SMALLEST_GROUP else 'row'}")
    if smaller:
        say("note: smaller groups where the width needs them: " + ", ".join(f"{n} {s}" for n, s in smaller.items()))
    return replace(recipe, overrides=smaller | dict(recipe.overrides))


def with_a_text_if_quick(source: "Source | WeightSource", recipe: Recipe) -> Recipe:
    """Return a recipe by gptq if calibration data is given or read within `PATIENCE` seconds; otherwise unchanged."""
    from diffquant.checkpoints.source import Source
    from diffquant.checkpoints.tokenizer import has_tokenizer
    from diffquant.quantization.plan import plan_quantization
    from diffquant.quantization.planning import estimated_seconds

    by_gptq = replace(recipe, rounding=replace(recipe.rounding, name="gptq"))
    if recipe.rounding.reads:
        return by_gptq
    if not isinstance(source, Source) or source.packed or not has_tokenizer(source.path):
        return recipe
    seconds = estimated_seconds(source, plan_quantization(source, by_gptq))
    if seconds <= PATIENCE:
        return by_gptq
    duration = format_duration(seconds)
    say(f"note: rounds by mse; {option_name('effort', 'balanced')} loses less, and takes about {duration}")
    return recipe


def with_a_rule_that_can(source: "Source | WeightSource", recipe: Recipe) -> Recipe:
    """Return a recipe by the default rule, or by nearest where that cannot do its schemes, which is said."""
    from diffquant.quantization.roundings import checked_rounding
    from diffquant.quantization.targets import targets_of

    schemes = {} if source.packed else targets_of(source).schemes(recipe)
    if not schemes:
        return replace(recipe, rounding=NEAREST)
    try:
        checked_rounding(recipe.rounding, schemes)
    except UsageError as error:
        if recipe.rounding.reads or recipe.rounding.options:
            raise
        say(f"note: rounds by nearest, since {error}")
        return replace(recipe, rounding=NEAREST)
    return recipe
