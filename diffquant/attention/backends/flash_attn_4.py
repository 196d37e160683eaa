"""Computes differential attention by the `flash-attn-4` package: FlashAttention in CuTe DSL, for Hopper and Blackwell.

Its values may be wider than its keys, so that V1 takes two calls and V2, whose maps share keys and values, one.
"""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from diffquant.attention.backends.composed import combine_outputs
from diffquant.attention.registry import Backend, register
from diffquant.family.call import AttentionCall, dtype_name
from diffquant.family.norm import pair_norm

# Widest keys and values by major compute capability; both are multiples of 8.
_WIDEST = {9: 256, 10: 128, 11: 128}


def flash_attn_4(call: AttentionCall) -> Tensor:
    """Compute attention with one call per map, or a single call if the maps share K (V2)."""
    from flash_attn.cute import flash_attn_func

    # The window counts the keys before a query's own.
    before = call.mask.window - 1 if call.mask.window and call.mask.is_window_effective(call.key_count) else None

    def one_map(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        # It takes [B, length, heads, width]; its causal mask is aligned at the last key.
        by_token = (x.transpose(1, 2) for x in (queries, keys, values))
        out: Tensor = flash_attn_func(*by_token, softmax_scale=call.scale, causal=True, window_size=(before, None))[0]
        return out.transpose(1, 2)

    return pair_norm(combine_outputs(call, call.v, one_map), call.post)


def _find_refusal(call: AttentionCall) -> str | None:
    if not call.v.is_cuda:
        return "flash-attn-4 runs on CUDA only"
    if call.v.dtype not in (torch.float16, torch.bfloat16):
        return f"diffquant calls flash-attn-4 in float16 and bfloat16, not {dtype_name(call.v.dtype)}"
    if not call.mask.is_unpadded or call.query_count > call.key_count:
        return "diffquant calls flash-attn-4 only for causal attention without padding, with or without a window"
    if call.needs_gradient:
        return "diffquant calls flash-attn-4 without gradients"
    major, minor = torch.cuda.get_device_capability(call.v.device)
    if major not in _WIDEST:
        return f"diffquant calls flash-attn-4 on Hopper and Blackwell (sm_90, sm_100, sm_110), not on sm_{major}{minor}"
    widths = call.q[0].shape[-1], call.v.shape[-1]
    if any(width % 8 or not 8 <= width <= _WIDEST[major] for width in widths):
        return (
            f"flash-attn-4 takes heads with a multiple of 8 channels, at most {_WIDEST[major]} on sm_{major}{minor}; "
            f"here keys have {widths[0]} and values {widths[1]}"
        )
    return None if _is_installed() else "the flash-attn-4 package is not installed: pip install flash-attn-4"


@cache
def _is_installed() -> bool:
    """Return whether the package is installed; cached, since every layer checks it at every step."""
    try:
        return find_spec("flash_attn.cute") is not None
    except ImportError:
        # There is no `flash_attn`, or one of another package that cannot be imported.
        return False


# No GPU has run it, so that it is never chosen automatically.
register(Backend("flash_attn_4", flash_attn_4, _find_refusal))
