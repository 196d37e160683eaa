"""Chooses the format in which vLLM stores keys and values, and how many tokens the cache of a folder holds."""

from collections.abc import Mapping
from math import ceil, prod
from typing import Any, get_args

from diffquant.checkpoints.compressed_config import has_own_kv_cache_scheme
from diffquant.checkpoints.reader import Checkpoint, read_stored_recipe
from diffquant.errors import UsageError
from diffquant.model.adapters import Adapter
from diffquant.model.architecture import Architecture, TransformerArchitecture
from diffquant.model.blocks import CachedShapes
from diffquant.support.names import did_you_mean, option_name

# Values of `cache` besides vLLM's names: the format in the recipe, and the model's dtype.
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
    if asked == RECIPE and has_own_kv_cache_scheme(config):
        return _STATIC
    listed = vllm_formats(has_gpu)
    if asked in listed:
        return asked
    if asked != RECIPE:
        known = dict.fromkeys([RECIPE, AUTO, *listed])
        where = "" if has_gpu else " on a CPU"
        raise UsageError(f"vLLM has no cache {asked!r}{where}{did_you_mean(asked, list(known))}")
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
    """Return overrides of config.json: its `quantization_config` and recipe without schemes of the KV cache.

    Passed as `--hf-overrides`, they make vLLM ignore the folder's cache scheme. `config` must have one.
    """
    entry, record = config["quantization_config"], config.get("diffquant_config") or {}
    recipe = {target: scheme for target, scheme in record.get("recipe", {}).items() if target not in ("k", "v")}
    return {
        "quantization_config": {key: value for key, value in entry.items() if key != "kv_cache_scheme"},
        "diffquant_config": record | {"recipe": recipe},
    }


ITEMSIZES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
# Extra tokens reserved per request: vLLM allocates its cache in blocks, of which a request leaves two partly empty.
_BLOCKS = 256
# Bytes of an element of a state, which is float32.
_STATE = 4
# Largest number of requests of full length for which the cache has space.
_REQUESTS = 16
# Bytes for vLLM itself and the activations of a batch, besides weights and cache.
_APART = 2 << 30


def plan_capacity(
    memory: int, checkpoint: Checkpoint, adapter: Adapter, itemsize: int, dtype: str, context: int | None
) -> tuple[int, int]:
    """Return how many tokens a request may have, and how many bytes the KV cache of all requests takes.

    Both are chosen so that the weights and the cache fit into memory.

    Args:
        memory: free bytes.
        dtype: name of the dtype of the weights while served.
        itemsize: bytes of an element of the cached keys and values.
        context: tokens per request; by default as many as the model supports and fit into memory.

    Raises:
        UsageError: not even one request with `context` tokens fits.
    """
    architecture = adapter.architecture
    a_token, a_request = _cache_bytes(architecture, itemsize)
    free = memory - _APART - _weight_bytes(checkpoint, adapter, dtype)
    fits = max(0, (free - a_request) // a_token)
    wanted = context or min(architecture.max_position_embeddings, fits)
    if not 0 < wanted <= fits:
        raise UsageError(
            f"the cache of {wanted or 'a few'} tokens takes {(a_token * wanted + a_request) / 1e9:.1f} GB, but after "
            f"the weights {max(0, free) / 1e9:.1f} GB of memory are free: use {option_name('context', fits)}"
        )
    return wanted, min(free, _REQUESTS * (wanted * a_token + a_request))


def _cache_bytes(architecture: Architecture, itemsize: int) -> tuple[int, int]:
    """Return the bytes that a token takes in the cache, and those of a request of any length."""
    spec = architecture.diff_spec
    # A cached head holds the keys of both maps. Values are cut into heads of that width, each stored with the keys.
    width = spec.key_heads // spec.kv_pairs * spec.head_dim
    heads = 2 * spec.kv_pairs * ceil(spec.value_dim / width) * width * itemsize
    a_token = a_request = 0
    for blocks in architecture.layers:
        for stored in (block.cached_shapes for block in blocks.values()):
            if isinstance(stored, CachedShapes):
                is_latent = stored.is_latent and stored.window is None
                each = (stored.keys[1] + stored.values[1]) * itemsize if is_latent else heads
                a_token += 0 if stored.window else each
                a_request += (_BLOCKS + (stored.window or 0)) * each
            elif stored is not None:
                a_request += sum(prod(shape) for shape in stored) * _STATE
    return a_token, a_request


def _weight_bytes(checkpoint: Checkpoint, adapter: Adapter, dtype: str) -> int:
    """Return the bytes of the weights as served: packed if all have 4 bits and vLLM can use them, else unpacked."""
    groups = (checkpoint.config.get("quantization_config") or {}).get("config_groups", {})
    widths = {group["weights"]["num_bits"] for group in groups.values()}
    if widths == {4} and dtype != "float32" and can_compile_and_shard(adapter):
        return sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    return sum(prod(shape) for shape in adapter.source_shapes().values()) * ITEMSIZES[dtype]


def can_compile_and_shard(adapter: Adapter | None) -> bool:
    """Return whether vLLM can compile a model and divide it among ranks, which diffquant's own decoders cannot be."""
    return adapter is None or isinstance(adapter.architecture, TransformerArchitecture)
