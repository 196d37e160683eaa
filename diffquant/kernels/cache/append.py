"""Appends new tokens to a `KVStore` and packs the tokens that leave the ring of unquantized ones.

Codes and scales are those of `diffquant.recipe.numbers`: scales in the dtype of keys and values, correctly rounded
division, half to even. The length is read and advanced on the device, so the launch may be captured in a CUDA graph.
"""

from functools import cache

import torch
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.kernels.cache.append_tokens import append_tokens
from diffquant.kernels.cache.kv_store import KVStore
from diffquant.kernels.cache.stored_side import TOKENS_A_STEP
from diffquant.kernels.linear.repack import FRAGMENT
from diffquant.recipe.numbers.absmax import max_code, to_storable_scale


def append(store: KVStore, k: Tensor, v: Tensor) -> None:
    """Append the keys and values of new tokens to a store.

    Args:
        store: store of one layer.
        k: keys [B, H, T, d], any strides.
        v: values [B, h_kv, T, dv], any strides.

    Raises:
        UsageError: the tensors do not match the store, or it is full.
    """
    tokens = k.shape[2]
    for name, x, side in (("k", k, store.keys), ("v", v, store.values)):
        shape = (*side.codes.shape[:2], tokens, side.width)
        if x.shape != shape or x.dtype != side.dtype or x.device != side.codes.device:
            raise UsageError(
                f"append: {name} is {x.dtype} {list(x.shape)} on {x.device}; the store expects {side.dtype} "
                f"{list(shape)} on {side.codes.device}"
            )
    if store.length + tokens > store.capacity:
        raise UsageError(
            f"append: {store.length} + {tokens} tokens do not fit a capacity of {store.capacity}; grow the store first"
        )
    if not tokens:
        return
    keys, values = store.keys, store.values
    # The torch operator is called only while tracing, since its overhead is longer than a launch.
    run = _op if torch.compiler.is_compiling() else _launch
    run(
        k, v, keys.tensors, values.tensors, store.progress,
        keys.scheme.bits, keys.tokens_per_scale, values.scheme.bits, max(keys.residual, values.residual),
    )  # fmt: skip
    store.length += tokens


def _launch(
    k: Tensor,
    v: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    progress: Tensor,
    k_bits: int,
    k_block: int,
    v_bits: int,
    residual: int,
) -> None:
    """Append to the tensors of a store; `keys` and `values` are `StoredKeysOrValues.tensors`."""
    batch, k_heads, tokens, width = k.shape
    v_heads, value_width = v.shape[1], v.shape[3]
    k_ring, v_ring = (side[3].shape[2] * FRAGMENT for side in (keys, values))
    steps, phases = plan_append_launches(tokens, k_block, k_ring, v_ring)
    with torch.cuda.device_of(k):
        for packs, keeps in phases:
            append_tokens[(steps * batch * (k_heads + v_heads),)](
                k, k.stride(), *keys, v, v.stride(), *values,
                progress, tokens, keys[0].shape[2] * FRAGMENT, steps, k_heads, v_heads,
                WIDTH=width, VALUE_WIDTH=value_width, K_BITS=k_bits, K_BLOCK=k_block, K_RING=k_ring, V_BITS=v_bits,
                V_RING=v_ring, RESIDUAL=residual, K_LIMIT=largest_scale(k_bits, k.dtype),
                V_LIMIT=largest_scale(v_bits, k.dtype), PACKS=packs, KEEPS=keeps, num_warps=4, enable_fp_fusion=True,
            )  # fmt: skip


_op = torch.library.custom_op("diffquant::append", _launch, mutates_args=("keys", "values", "progress"))


@_op.register_fake
def _(*_args: object) -> None:
    return None


def plan_append_launches(tokens: int, k_block: int, k_ring: int, v_ring: int) -> tuple[int, list[tuple[bool, bool]]]:
    """Return how an append of `tokens` tokens is launched.

    A step is a range of tokens of one head that one program processes.

    Args:
        tokens: number of new tokens.
        k_block: number of tokens that share K's scales.
        k_ring, v_ring: numbers of tokens in the rings of K and V; 0 without a ring.

    Returns:
        steps: upper limit of the number of steps per head.
        launches: for each launch, whether it packs tokens that leave the ring, and whether it writes new tokens to it.
    """
    steps = max(
        _most_packed_steps(tokens, k_block) + _most_waiting_steps(tokens, k_ring, k_block),
        _most_packed_steps(tokens, 1) + _most_waiting_steps(tokens, v_ring, 1),
    )
    # More new tokens than the ring has slots could overwrite tokens that are still to be packed.
    fits = all(tokens <= ring for ring in (k_ring, v_ring) if ring)
    return steps, [(True, True)] if fits else [(True, False), (False, True)]


def _tokens_a_step(block: int) -> int:
    """Return the number of tokens that one program packs or copies."""
    return block if block > 1 else TOKENS_A_STEP


def _most_packed_steps(tokens: int, block: int) -> int:
    """Return the largest number of steps that may be packed, wherever they begin."""
    return -(-(tokens + block - 1) // _tokens_a_step(block)) + 1


def _most_waiting_steps(tokens: int, ring: int, block: int) -> int:
    """Return the largest number of steps that may be written to the window."""
    return -(-min(tokens, ring) // _tokens_a_step(block)) + 1 if ring else 0


@cache
def largest_scale(bits: int, dtype: torch.dtype) -> float:
    """Return the largest scale whose products with codes of `bits` bits do not overflow `dtype`; 1 for 16 bits."""
    return 1.0 if bits == 16 else float(to_storable_scale(torch.tensor(torch.inf), max_code(bits), dtype))
