"""Checks of a call of `generate`: supported caches and options, and finite logits."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from diffquant.errors import NonFiniteError, UsageError
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import Scheme
from diffquant.recipe.targets import target_of

# `cache_implementation` values whose caches grow and hold only tokens already read.
_GROWING = ("dynamic", "dynamic_full", "offloaded", "quantized")
# Options, other than `assistant_model`, that turn on assisted decoding.
_DRAFTING = ("prompt_lookup_num_tokens", "use_mtp")
# Number of tokens that `generate` adds to the prompt if no length is set.
_DEFAULT_NEW = 20
# Backends by transformers' names of attention implementations.
BACKEND_OF = {"sdpa": "auto", "eager": "naive", "flash_attention_2": "flash_attn"}


def check_cache(cache: Cache, recipe: Recipe, is_quantized: bool) -> None:
    """Check that a cache passed by a caller stores keys and values as the recipe requires.

    Args:
        cache: cache passed by the caller.
        recipe: recipe of the model.
        is_quantized: whether the recipe quantizes some layer's keys or values.

    Raises:
        UsageError: the cache stores 16 bits instead of the recipe's codes, belongs to another recipe, or has static or
            sliding-window layers, which do not return exactly the tokens stored in them.
    """
    kind = type(cache).__name__
    if not hasattr(cache, "get_seq_length"):
        raise UsageError(f"the cache argument is a {kind}, not a cache; pass the result of new_cache()")
    own = getattr(cache, "recipe", None)
    if is_quantized and isinstance(own, Recipe) and _cache_parts(own) != _cache_parts(recipe):
        raise UsageError(
            f"this cache belongs to another recipe: it has {_describe_cache(own)}, and the model "
            f"{_describe_cache(recipe)}; pass the result of new_cache()"
        )
    layers = getattr(cache, "layers", ())
    fixed = [type(layer).__name__ for layer in layers if layer.is_compileable or layer.is_sliding]
    if fixed:
        raise UsageError(
            f"the cache is a {kind} with layers of kind {fixed[0]}, which do not return the tokens that were stored; "
            "pass the result of new_cache()"
        )
    if is_quantized and (isinstance(cache, DynamicCache) or type(cache).__module__ == Cache.__module__):
        raise UsageError(
            f"the cache is a {kind}, and the model's recipe has {_describe_cache(recipe)}, which it would not "
            f"keep; pass the result of new_cache(), or nothing"
        )


def resolve_setting(model: PreTrainedModel, given: Mapping[str, Any], name: str) -> Any:
    """Return a setting of a `generate` call, or None if it is not set.

    It is looked up in the call's arguments `given`, then in their generation_config, then in the model's.
    """
    configured = (getattr(each, name, None) for each in (given.get("generation_config"), model.generation_config))
    return next((value for value in (given.get(name), *configured) if value is not None), None)


def max_total_length(model: PreTrainedModel, given: Mapping[str, Any]) -> int:
    """Return the largest number of tokens, prompt included, that a `generate` call with arguments `given` may reach."""
    length, new = _prompt_length(given), resolve_setting(model, given, "max_new_tokens")
    most = resolve_setting(model, given, "max_length") if new is None else length + new
    return length + _DEFAULT_NEW if most is None else max(length, most)


def _prompt_length(given: Mapping[str, Any]) -> int:
    prompts = (given.get(name) for name in ("inputs", "input_ids", "inputs_embeds"))
    return next((prompt.shape[1] for prompt in prompts if prompt is not None), 0)


def check_generation(model: PreTrainedModel, given: Mapping[str, Any]) -> None:
    """Check that the model supports the options of a `generate` call.

    Args:
        model: a `CausalModel`.
        given: arguments of `generate` by name.

    Raises:
        UsageError: the kind of cache is not supported, or assisted decoding or chunked prefill would change the tokens.
    """
    if resolve_setting(model, given, "assistant_early_exit"):
        raise UsageError("assistant_early_exit: this model runs all of its layers; pass an assistant_model instead")
    kind = resolve_setting(model, given, "cache_implementation")
    if kind == "paged":
        model.init_continuous_batching()
    if kind == "offloaded" and model.device.type == "cpu":
        raise UsageError("cache_implementation='offloaded' moves a cache off a GPU, and the model is on the CPU")
    if kind is not None and kind not in _GROWING:
        raise UsageError(
            f"cache_implementation={kind!r} allocates memory for later tokens, which this attention does not "
            f"support; leave it out, or choose {', '.join(_GROWING)}"
        )
    if kind is not None and model.model.needs_own_cache(kind):
        raise UsageError(
            f"cache_implementation={kind!r} would not store what this model caches ({_describe_cache(model.recipe)}); "
            "leave it out"
        )
    is_drafted = given.get("assistant_model") is not None or any(
        resolve_setting(model, given, name) for name in _DRAFTING
    )
    decoder, total = model.model, max_total_length(model, given)
    refusal = (decoder.crop_refusal or decoder.explain_step_dependence(total)) if is_drafted else None
    if refusal is not None:
        raise UsageError(
            f"assisted decoding and prompt lookup would change the generated tokens: {refusal}; leave "
            "out assistant_model and prompt_lookup_num_tokens"
        )
    is_chunked = resolve_setting(model, given, "prefill_chunk_size")
    refusal = decoder.explain_step_dependence(_prompt_length(given)) if is_chunked else None
    if refusal is not None:
        raise UsageError(f"prefill_chunk_size would change the generated tokens: {refusal}; leave it out")
    for drafter in (given.get("assistant_model"), model if resolve_setting(model, given, "is_assistant") else None):
        refusal = getattr(getattr(drafter, "model", None), "crop_refusal", None)
        if refusal is not None:
            raise UsageError(f"the assistant model cannot drop rejected tokens: {refusal}; choose another assistant")


def explain_step_dependence(recipe: Recipe, has_windows: bool) -> str | None:
    """Return why results depend on the number of tokens per step or on rejected tokens, or None if they do not.

    Args:
        has_windows: whether some layers cache the newest tokens only, and so count groups of keys from another one.
    """
    of_cache = [scheme for target in ("k", "v") for scheme in recipe.schemes_of(target) if scheme.quantizes]
    if of_cache and recipe.residual:
        return f"the newest {recipe.residual} tokens in the cache stay at 16 bits (residual)"
    blocks = [scheme for scheme in of_cache if not scheme.sharing.is_token_local]
    if blocks:
        return f"keys at {blocks[0]} are rounded by blocks of tokens"
    operands = {"logits": "logits", "qk": "queries and keys", "p": "softmax weights", "pv": "values before P·V"}
    for target, what in operands.items():
        for scheme in recipe.schemes_of(target):
            by_token = scheme.is_token_local and (target != "pv" or scheme.granularity == "row")
            if scheme.quantizes and not by_token:
                return f"{what} at {scheme} have scales over several tokens"
            if has_windows and target in ("logits", "p") and scheme.granularity in ("group", "block"):
                return f"{what} at {scheme} have scales over several keys, and windows begin at another key each time"
    return None


def _cache_parts(recipe: Recipe) -> tuple[Scheme, Scheme, int, dict[str, Scheme]]:
    """Return the settings of a recipe that a cache depends on: `k`, `v`, `residual` and overrides of these."""
    own = {pattern: scheme for pattern, scheme in recipe.overrides.items() if target_of(pattern) in ("k", "v")}
    return recipe.k, recipe.v, recipe.residual, own


def _describe_cache(recipe: Recipe) -> str:
    k, v, residual, overrides = _cache_parts(recipe)
    parts = [f"k {k}", f"v {v}", *([f"residual {residual}"] if residual else [])]
    return ", ".join([*parts, *(f"{pattern} {scheme}" for pattern, scheme in overrides.items())])


class FiniteLogitsProcessor(LogitsProcessor):
    """Logits processor that raises an error if a sequence's largest logit is not finite; -inf marks excluded tokens."""

    def __init__(self, model: PreTrainedModel, attention_mask: Tensor | None, has_ids: bool) -> None:
        """Create a processor for one call of `generate`.

        Args:
            model: `CausalModel` that generates.
            attention_mask: the prompt's mask [B, T], if one was passed.
            has_ids: whether the prompt is given as token ids, so that it can be run again to find the failing layer.
        """
        self.model = model
        self.attention_mask = attention_mask
        self.has_ids = has_ids

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores [B, V] unchanged.

        Raises:
            NonFiniteError: the largest score of a sequence is NaN or infinite.
        """
        if not torch.isfinite(scores.amax(-1)).all():
            raise NonFiniteError(self._message(input_ids))
        return scores

    def _message(self, ids: Tensor) -> str:
        dtype = str(self.model.dtype).removeprefix("torch.")
        where = self._place(ids) if self.has_ids and ids.shape[1] else "the model"
        advice = "in bfloat16 or float32" if dtype == "float16" else "with finite weights, or more bits"
        return f"{where} computes NaN or infinity in {dtype}, and no token can be chosen: run the model {advice}"

    def _place(self, ids: Tensor) -> str:
        """Return the name of the first module whose output for tokens [B, T] is not finite."""
        mask = self.attention_mask
        # A 4-D mask does not cover generated tokens.
        if mask is not None and mask.dim() != 2:
            mask = None
        if mask is not None:
            mask = mask.repeat_interleave(len(ids) // len(mask), 0)
            mask = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], 1)
        out = self.model.model(ids, mask, output_hidden_states=True)
        names = ["model.embed_tokens", *(f"model.layers.{layer}" for layer in range(len(self.model.model.layers)))]
        is_finite = [bool(torch.isfinite(states).all()) for states in out.hidden_states]
        return next((name for name, fine in zip(names, is_finite, strict=True) if not fine), "lm_head")
