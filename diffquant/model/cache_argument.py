"""The argument that hands a model its cache: `cache` since transformers 5.24, `past_key_values` before."""

from collections.abc import MutableMapping
from typing import Any

from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

from diffquant.errors import UsageError

# The installed transformers' name, among the arguments of `generate` as among the fields of an output.
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"


def given_cache(past_key_values: Cache | None, cache: Cache | None) -> Cache | None:
    """The cache that came by one of its names.

    Raises:
        UsageError: it came by both.
    """
    if past_key_values is not None and cache is not None:
        raise UsageError("the cache came twice, as cache and as past_key_values; pass it once")
    return past_key_values if cache is None else cache


def pop_cache(given: MutableMapping[str, Any]) -> Cache | None:
    """Take the cache out of arguments by name, where it may have either name.

    Raises:
        UsageError: it came by both.
    """
    return given_cache(given.pop("past_key_values", None), given.pop("cache", None))
