"""Checks a call of `generate` for caches and options that this attention does not support."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from diffquant.errors import UsageError
from diffquant.recipe import Recipe
from diffquant.recipe.targets import target_of
from diffquant.scheme import Scheme

# Kinds of caches that hold what they have read and nothing else.
_GROWING = ("dynamic", "dynamic_full", "offloaded", "quantized")
# The ways to ask for drafts, beside an assistant.
_DRAFTING = ("prompt_lookup_num_tokens", "use_mtp")
# Names that transformers has for attention, and the backend that is meant.
BACKEND_OF = {"sdpa": "auto", "eager": "naive", "flash_attention_2": "flash_attn"}


def check_cache(cache: Cache, recipe: Recipe, is_quantized: bool) -> None:
    """Check that a cache that a caller brings keeps what the recipe says.

    Args:
        cache: cache.
        recipe: recipe of the model.
        is_quantized: whether it quantizes some layer's keys or values.

    Raises:
        UsageError: it keeps 16 bits, or codes of another recipe, or more or fewer tokens than it was given.
    """
    kind = type(cache).__name__
    if not hasattr(cache, "get_seq_length"):
        raise UsageError(f"what was passed as the cache is a {kind}, not a cache; pass the result of new_cache()")
    own = getattr(cache, "recipe", None)
    if is_quantized and isinstance(own, Recipe) and _of_cache(own) != _of_cache(recipe):
        raise UsageError(
            f"this is a cache of another recipe: it has {_said(own)}, and the model {_said(recipe)}; pass "
            "what new_cache() gives"
        )
    layers = getattr(cache, "layers", ())
    fixed = [type(layer).__name__ for layer in layers if layer.is_compileable or layer.is_sliding]
    if fixed:
        raise UsageError(
            f"the cache is a {kind} with layers of kind {fixed[0]}, which give back other tokens than they were "
            "given; pass a DynamicCache, or what new_cache() gives"
        )
    if is_quantized and (isinstance(cache, DynamicCache) or type(cache).__module__ == Cache.__module__):
        raise UsageError(
            f"the cache is a {kind}, and the model's recipe has {_said(recipe)}, which it would not keep; pass "
            "what new_cache() gives, or nothing"
        )


def asked(model: PreTrainedModel, given: Mapping[str, Any], name: str) -> Any:
    """A setting of a call of `generate`: its own, or that of the configuration it was given, or else the model's."""
    configured = (getattr(each, name, None) for each in (given.get("generation_config"), model.generation_config))
    return next((value for value in (given.get(name), *configured) if value is not None), None)


def check_generation(model: PreTrainedModel, given: Mapping[str, Any]) -> None:
    """Check what `generate` is asked for.

    Args:
        model: a `CausalModel`.
        given: arguments of `generate` by name.

    Raises:
        UsageError: the model has no such cache, or drafts or chunks of the prompt would change what it generates.
    """
    if asked(model, given, "assistant_early_exit"):
        raise UsageError("assistant_early_exit: this model runs all of its layers; pass an assistant_model instead")
    kind = asked(model, given, "cache_implementation")
    if kind == "paged":
        model.init_continuous_batching()
    if kind == "offloaded" and model.device.type == "cpu":
        raise UsageError("cache_implementation='offloaded' moves a cache off a GPU, and the model is on the CPU")
    if kind is not None and kind not in _GROWING:
        raise UsageError(
            f"cache_implementation={kind!r} is a cache with room for tokens to come, which this attention does not "
            f"read; leave it out, or choose {', '.join(_GROWING)}"
        )
    if kind is not None and model.model.needs_own_cache(kind):
        raise UsageError(
            f"cache_implementation={kind!r} would not keep what this model's own cache does ({_said(model.recipe)}); "
            "leave it out"
        )
    is_drafted = given.get("assistant_model") is not None or any(asked(model, given, name) for name in _DRAFTING)
    refusal = model.model.draft_refusal() if is_drafted else None
    if refusal is not None:
        raise UsageError(
            f"assisted decoding and prompt lookup would give other tokens than decoding step by step: {refusal}; leave "
            "out assistant_model and prompt_lookup_num_tokens"
        )
    refusal = dependence_on_steps(model.recipe) if asked(model, given, "prefill_chunk_size") else None
    if refusal is not None:
        raise UsageError(
            f"prefill_chunk_size would give other tokens than a prompt that is read at once: {refusal}; leave it out"
        )
    for drafter in (given.get("assistant_model"), model if asked(model, given, "is_assistant") else None):
        refusal = getattr(getattr(drafter, "model", None), "crop_refusal", None)
        if refusal is not None:
            raise UsageError(f"the assistant cannot take back what was rejected: {refusal}; choose another assistant")


def dependence_on_steps(recipe: Recipe) -> str | None:
    """The reason why reading tokens at once, or dropping them again, changes results, or None if it does not."""
    of_cache = [scheme for target in ("k", "v") for scheme in recipe.schemes_of(target) if scheme.quantizes]
    if of_cache and recipe.residual:
        return f"of the cache the newest {recipe.residual} tokens stay at 16 bits (residual)"
    blocks = [scheme for scheme in of_cache if not scheme.sharing.by_token]
    if blocks:
        return f"keys at {blocks[0]} are rounded by blocks of tokens"
    for target, what in (("logits", "logits"), ("qk", "queries and keys"), ("pv", "values before P·V")):
        for scheme in recipe.schemes_of(target):
            by_token = scheme.granularity == "row" if target == "pv" else scheme.sharing.by_token
            if scheme.quantizes and (not by_token or scheme.smooth or scheme.smoothq):
                return f"{what} at {scheme} have scales over several tokens"
    return None


def _of_cache(recipe: Recipe) -> tuple[Scheme, Scheme, int, dict[str, Scheme]]:
    """The parts of a recipe that a cache depends on: `k`, `v`, `residual` and their overrides."""
    own = {pattern: scheme for pattern, scheme in recipe.overrides.items() if target_of(pattern) in ("k", "v")}
    return recipe.k, recipe.v, recipe.residual, own


def _said(recipe: Recipe) -> str:
    k, v, residual, overrides = _of_cache(recipe)
    parts = [f"k {k}", f"v {v}", *([f"residual {residual}"] if residual else [])]
    return ", ".join([*parts, *(f"{pattern} {scheme}" for pattern, scheme in overrides.items())])
