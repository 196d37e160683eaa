"""Chooses the format in which vLLM stores keys and values, for the recipe of a folder."""

from collections.abc import Mapping
from typing import Any, get_args

from diffquant.checkpoints.compressed_config import has_kv_cache_scheme
from diffquant.checkpoints.reader import read_stored_recipe
from diffquant.errors import UsageError
from diffquant.support.names import did_you_mean, option_name

# What `cache` may be beside a name of vLLM's: the recipe's own, or none of it.
RECIPE, AUTO = "recipe", "auto"
# vLLM's format that stores what compressed-tensors' scheme of a cache describes.
_STATIC = "fp8_e4m3"
# vLLM's nearest formats by the recipe's, and how each differs.
_NEAREST = {
    "8": ("int8_per_token_head", "one scale per token and stored head, which in DIFF V1 holds keys of both maps"),
    "4": ("int4_per_token_head", "which rotates channels and has a zero point"),
    "e4m3": ("fp8_per_token_head", "one scale per token and stored head, which in DIFF V1 holds keys of both maps"),
    "e5m2": ("fp8_e5m2", "without scales"),
}
_ANYWHERE = ("fp8", "8-bit floats without calibrated scales")


def choose_cache(config: Mapping[str, Any], asked: str, has_gpu: bool) -> str:
    """Return vLLM's name for the format in which it stores the KV cache; "auto" means the model's dtype.

    Args:
        config: content of the folder's config.json.
        asked: "recipe" for the format in the folder's recipe, "auto", or vLLM's name of a format.

    Raises:
        UsageError: vLLM does not support the recipe's cache format, or has no format named `asked`.
    """
    recipe = read_stored_recipe(config)
    if asked == AUTO or (asked == RECIPE and not recipe.quantizes_any("k", "v")):
        return AUTO
    if asked == RECIPE and has_kv_cache_scheme(config):
        return _STATIC
    listed = vllm_formats(has_gpu)
    if asked in listed:
        return asked
    if asked != RECIPE:
        known = dict.fromkeys([RECIPE, AUTO, *listed])
        where = "" if has_gpu else " on a CPU"
        raise UsageError(
            f"vLLM has no cache {asked!r}{where}{did_you_mean(asked, list(known))}; choose from {', '.join(known)}"
        )
    name, difference = _NEAREST.get(recipe.k.format.name, _ANYWHERE)
    if name not in listed:
        name, difference = _ANYWHERE
    raise UsageError(
        f"vLLM does not have this recipe's cache (k {recipe.k}, v {recipe.v}): the nearest is "
        f"{option_name('cache', name)}, {difference}; {option_name('cache', AUTO)} stores K and V in the model's dtype"
    )


def vllm_formats(has_gpu: bool) -> tuple[str, ...]:
    """Return the names of the installed vLLM's cache formats: all of them with a GPU, else those of its CPU backend."""
    if has_gpu:
        from vllm.config.cache import CacheDType

        return get_args(CacheDType)
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return tuple(CPUAttentionBackend.supported_kv_cache_dtypes)


def is_fp8(cache: str) -> bool:
    """Return whether a format of vLLM's cache is an 8-bit float."""
    return cache.startswith("fp8")


def override_cache_scheme(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a replacement of config.json's `quantization_config` without the scheme of the KV cache.

    With this entry, vLLM ignores the folder's cache scheme. `config` must have a `quantization_config`.
    """
    entry = config["quantization_config"]
    return {"quantization_config": {key: value for key, value in entry.items() if key != "kv_cache_scheme"}}
