"""The context and the cache that a served model has room for beside its weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod

from diffquant.errors import UsageError
from diffquant.formats.reader import Checkpoint
from diffquant.model.adapters import Adapter
from diffquant.support.spelling import spelled

ITEMSIZES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
# vLLM gives out its cache in blocks of tokens, a request's last one and one more being partly empty.
_BLOCKS = 256
# Requests of full length that the cache has room for, where memory has.
_REQUESTS = 16
# What vLLM and a batch take beside weights and cache.
_APART = 2 << 30


@dataclass(frozen=True)
class Room:
    """Tokens of a request, and bytes of the cache that all requests share."""

    context: int
    cache: int


def room_in(
    memory: int, checkpoint: Checkpoint, adapter: Adapter, itemsize: int, dtype: str, context: int | None
) -> Room:
    """The context and the cache that fit into free memory beside the weights.

    Args:
        memory: free bytes.
        itemsize: bytes of a stored channel of a key or value.
        context: tokens of a request that are asked for; by default as many as the model knows
            and the memory has room for.

    Raises:
        UsageError: not one request of that context fits, or the model knows fewer positions.
    """
    architecture = adapter.architecture
    spec, layers = architecture.diff_spec, architecture.num_hidden_layers
    # Both maps' keys are one head, and values are cut into heads of that width, the keys beside each.
    width = spec.key_heads // spec.kv_pairs * spec.head_dim
    a_token = 2 * layers * spec.kv_pairs * ceil(spec.value_dim / width) * width * itemsize
    free = memory - _APART - _weight_bytes(checkpoint, adapter, dtype)
    fits = max(0, free // a_token - _BLOCKS)
    if context is not None and context > architecture.max_position_embeddings:
        known = architecture.max_position_embeddings
        raise UsageError(f"{spelled('context', context)} is more than the {known} positions that the model knows")
    wanted = context or min(architecture.max_position_embeddings, fits)
    if not 0 < wanted <= fits:
        raise UsageError(
            f"the cache of {wanted or 'a few'} tokens takes {a_token * (wanted + _BLOCKS) / 1e9:.1f} GB, and beside "
            f"the weights {max(0, free) / 1e9:.1f} GB of memory are free: {spelled('context', fits)} fits"
        )
    return Room(wanted, min(free, _REQUESTS * (wanted + _BLOCKS) * a_token))


def _weight_bytes(checkpoint: Checkpoint, adapter: Adapter, dtype: str) -> int:
    """Bytes of the weights as they are served: packed in 4 bits where vLLM multiplies these, or one by one."""
    groups = checkpoint.config.get("quantization_config", {}).get("config_groups", {})
    widths = {group["weights"]["num_bits"] for group in groups.values()}
    if widths == {4} and dtype != "float32":
        return sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    return sum(prod(shape) for shape in adapter.source_shapes().values()) * ITEMSIZES[dtype]
