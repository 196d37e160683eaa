"""A verb's recipe: one argument in Python, and several options on the command line."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from diffquant.errors import UsageError
from diffquant.recipe import Recipe, RecipeLike
from diffquant.recipe.presets import LIKE, PRESETS
from diffquant.recipe.rounding import NEAREST, RoundingSettings
from diffquant.recipe.scheme import Scheme
from diffquant.support.names import find_duplicates, option_name
from diffquant.verbs import kinds
from diffquant.verbs.notes import say

if TYPE_CHECKING:
    from diffquant.checkpoints.source import Source
    from diffquant.checkpoints.weight_source import WeightSource

# Options that name a recipe, or its operands, as a whole.
_WHOLE = ("recipe", "preset", "like")
# Largest number of weights for which gptq is chosen automatically: 20 minutes of two fast cores by default.
GPTQ_WEIGHTS = 10**9
# Smaller groups spend more bits on scales than they gain, so such a weight has one scale per output channel.
SMALLEST_GROUP = 8


def recipe_from_options(
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
    """Make a verb's recipe from options of the command line, in a form for `Recipe.parse`, or None if there are none.

    Args:
        recipe: YAML file of a recipe, instead of the schemes.
        preset: named recipe. int4: weights 4:g32, also known as w4a16. int8: weights 8:row and an 8-bit KV cache.
            w8a8, fp8, w4a8: weights 8:row, e4m3:row or 4:g32, and 8-bit activations. kv-4bit-best: a KV cache with
            k 4:c32, v 4:row:rotated and residual 64. paper: logits 4:tensor, the fewest bits in the DIFF paper's
            Figure 8.
        weights: scheme of the weights, as FORMAT[:GRANULARITY]: 4:g32, 6:channel, nvfp4 or 16.
        kv: scheme of the KV cache: 8, 4:token, 4:g32 or 16.
        k: scheme of keys, instead of `kv`; 4:c64 has one scale per channel and 64 tokens.
        v: scheme of values, instead of `kv`.
        logits: scheme of attention logits, whose rounding is simulated: 6:row, 4:tensor, 4:row:shift or 16.
        qk: scheme of the queries and keys of Q·Kᵀ, whose rounding is simulated: 8:row, 4:b64:smooth or 16.
        p: scheme of softmax weights before division by their row's sum, whose rounding is simulated: 8:row, e4m3:row,
            nvfp4 or 16.
        pv: scheme of the values that softmax weights multiply, in addition to the cache's scheme; simulated:
            e4m3:channel, nvfp4, 8:g32 or 16.
        activations: scheme of the inputs of Linears with quantized weights, rounded per token while the model runs: 8,
            fp8, 4, nvfp4 or 16.
        like: published kernel, whose schemes apply to those of qk, p and pv that are not given: sage2 (int8 and FP8),
            sage2-int4, sage3 (NVFP4), fa3-fp8 or modelopt-nvfp4.
        residual: number of newest tokens in the KV cache that stay 16-bit; 0 by default.
        overrides: scheme for some weights, for layers' .k, .v, .logits, .qk, .p and .pv, or for weights' .activations:
            '*.mlp.*=6:row', '*.layers.3.*.k=8', '*.down_proj.activations=16'; the first match wins.

    Raises:
        UsageError: options exclude each other, or one cannot be parsed.
    """
    given = {**locals(), "overrides": _overrides(overrides) or None}
    stated = {name: each for name, each in given.items() if each is not None and name not in _WHOLE}
    kernel = {} if like is None else {"like": like}
    if recipe is not None and preset is not None:
        raise UsageError(f"{option_name('recipe')} and {option_name('preset')} both set the recipe; give only one")
    if recipe is not None and like is not None:
        raise UsageError(
            f"{option_name('recipe')} and {option_name('like', like)} cannot be combined; write into the recipe: "
            + ", ".join(f"{target} {scheme}" for target, scheme in LIKE.get(like, {}).items())
        )
    whole = "preset" if recipe is None else "recipe"
    if stated and not (recipe is None and preset is None):
        raise UsageError(f"{option_name(whole)} cannot be combined with {', '.join(map(option_name, stated))}")
    if recipe is not None:
        return recipe
    if preset is not None:
        if preset not in PRESETS:
            raise UsageError(f"unknown preset {preset!r}; choose from {', '.join(PRESETS)}")
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


def shrink_groups(source: "Source | WeightSource", recipe: Recipe) -> Recipe:
    """Return a preset's recipe with other groups for weights whose width is not a multiple of the group size.

    Print a note about these weights.
    """
    from diffquant.quantization.targets import find_packable_modules

    targets, smaller = find_packable_modules(source), dict[str, Scheme]()
    for module, scheme in ({} if source.packed else targets.schemes(recipe)).items():
        width = source.checkpoint.tensors[targets.weights[module]].shape[-1]
        if scheme.granularity_size and width % scheme.granularity_size:
            pattern = re.sub(r"^.*?\.\d+\.", "*.", module)
            group = math.gcd(width, scheme.granularity_size)
            smaller[pattern] = Scheme.parse(f"{scheme.format.name}:{f'g{group}' if group >= SMALLEST_GROUP else 'row'}")
    if smaller:
        say("note: groups that divide the width: " + ", ".join(f"{n} {s}" for n, s in smaller.items()))
    return replace(recipe, overrides=smaller | dict(recipe.overrides))


def choose_gptq_if_small(source: "Source | WeightSource", recipe: Recipe) -> Recipe:
    """Return the recipe with rounding gptq for small models, or if it has calibration settings; otherwise unchanged.

    A model is small if at most `GPTQ_WEIGHTS` of its weights are quantized. Nothing changes if there is an importance
    matrix, or if the model has packed weights, no tokenizer or an unknown architecture.
    """
    from diffquant.checkpoints.source import Source
    from diffquant.checkpoints.tokenizer import has_tokenizer
    from diffquant.quantization.plan import plan_quantization

    by_gptq = replace(recipe, rounding=replace(recipe.rounding, name="gptq"))
    if recipe.rounding.calibration_settings:
        return by_gptq
    has_imatrix = recipe.rounding.imatrix is not None
    if has_imatrix or not isinstance(source, Source) or source.packed or not has_tokenizer(source.path):
        return recipe
    plan = plan_quantization(source, by_gptq)
    return by_gptq if sum(tensor.elements for tensor in plan.packed) <= GPTQ_WEIGHTS else recipe


def choose_supported_rounding(source: "Source | WeightSource", recipe: Recipe) -> Recipe:
    """Return a recipe whose rounding supports its schemes: if it does not, print a note and change it to nearest.

    Raises:
        UsageError: the rounding does not support the schemes, and has options or calibration settings.
    """
    from diffquant.quantization.roundings import checked_rounding
    from diffquant.quantization.targets import find_packable_modules

    schemes = {} if source.packed else find_packable_modules(source).schemes(recipe)
    if not schemes:
        return replace(recipe, rounding=NEAREST)
    try:
        checked_rounding(recipe.rounding, schemes)
    except UsageError as error:
        if recipe.rounding.calibration_settings or recipe.rounding.options:
            raise
        say(f"note: rounding by nearest, because {error}")
        return replace(recipe, rounding=NEAREST)
    return recipe


def update_rounding(
    settings: RoundingSettings, given: str | Mapping[str, Any] | None, calibration: Mapping[str, Any]
) -> RoundingSettings:
    """Return a recipe's rounding settings with changes.

    Args:
        settings: the recipe's settings, which are dropped if `given` is a different rule.
        given: a rule's name, or a mapping of settings as in a recipe, or None to keep the rule.
        calibration: calibration settings by name; those that are None stay unchanged. A number of tokens replaces a
            number of samples, and the reverse.
    """
    if given is not None and given != settings.name:
        settings = RoundingSettings.parse(given)
    changed = {name: value for name, value in calibration.items() if value is not None}
    for name, other in (("tokens", "samples"), ("samples", "tokens")):
        if name in changed and other not in changed:
            changed[other] = None
    return replace(settings, **changed)
