"""Reasons to refuse arguments that the attention kernels share, and the tensor they write to.

Shapes: B batch, T queries, S keys, h pairs, h_kv KV pairs, d query and key width, dv value width.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from diffquant.family.call import AttentionCall, dtype_name

HALF_TYPES = (torch.float16, torch.bfloat16)


def call_refusal(call: AttentionCall) -> str | None:
    """Reason why no attention kernel computes a call, whatever the device, or None."""
    if call.needs_gradient:
        return "the kernel has no backward pass; call it under torch.no_grad()"
    if call.signal_gate is not None:
        return "the signal map has a gate of its own, which the kernel does not compute"
    if call.signals_per_noise > 1:
        return f"{call.signals_per_noise} pairs share a noise head; the kernel takes one a pair: `expanded` gives it"
    if call.mask.seen is not None:
        return "the kernel knows only causal masks, but the call says which keys each query sees"
    if call.mask.hides_by_window(call.keys):
        return f"the kernel has no window, and queries see {call.mask.window} of {call.keys} keys"
    if call.mask.keys is not None and call.mask.ranges is None:
        return "the padding mask has holes; the kernels take one range of keys a sequence"
    return None


def widths_refusal(q: Tensor, v: Tensor, dtypes: Collection[torch.dtype] = HALF_TYPES) -> str | None:
    """Reason why an attention kernel for d of 64 or 128, and dv of d or 2d, refuses these widths or types, or None."""
    if q.dtype not in dtypes:
        return f"q, k and v are {dtype_name(q.dtype)}; the kernel takes {' and '.join(map(dtype_name, dtypes))}"
    width, value_width = q.shape[-1], v.shape[-1]
    if width not in (64, 128):
        return f"q and k are {width} wide; the kernel takes head widths 64 and 128"
    if value_width not in (width, 2 * width):
        return f"v is {value_width} wide; with keys {width} wide the kernel takes {width} and {2 * width}"
    return None


def empty_output(q: Tensor, value_width: int) -> Tensor:
    """Empty [B, h, T, dv], its memory [B, T, h, dv], so that the output projection flattens heads without a copy."""
    batch, pairs, queries, _ = q.shape
    return q.new_empty(batch, queries, pairs, value_width).transpose(1, 2)
