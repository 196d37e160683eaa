"""Computes differential attention by calling existing attention kernels.

The paper's appendix A gives two compositions: FlashDiffAttn_1 makes two calls and needs a kernel whose values may be
wider than its keys; FlashDiffAttn_2 makes four calls, one for each map and each half of V.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from diffquant.attention.registry import Backend, register
from diffquant.family.call import AttentionCall
from diffquant.family.heads import repeat_noise_heads
from diffquant.family.norm import pair_norm

# Largest head width that the flash-attn package supports.
_WIDEST = 256
# Speed of the fused prefill on an H100 relative to one cuDNN call per map, by whether the maps share keys, key width
# and prompt length (bench/results/h100/ratios.json.xz).
FUSED_AGAINST_CUDNN = {
    (False, 128, 16384): 1.05,
    (False, 128, 8192): 1.04,
    (False, 128, 4096): 1.01,
    (False, 64, 8192): 0.94,
    (True, 128, 8192): 0.78,
}
# Function of q [B, H, T, d], k [B, H_kv, S, d] and v [B, H_kv, S, dv] that returns [B, H, T, dv].
MapAttention = Callable[[Tensor, Tensor, Tensor], Tensor]


def flashdiff1(call: AttentionCall) -> Tensor:
    """Compute attention with one SDPA call per map, or a single call if the maps share K (V2)."""
    return pair_norm(combine_outputs(call, call.v, prepare_sdpa(call)), call.post)


def flashdiff2(call: AttentionCall) -> Tensor:
    """Compute attention with V split into parts as wide as K, and one SDPA call per map and part.

    If the maps share K (V2), one call per part computes both.
    """
    return _attend_by_parts(call, prepare_sdpa(call))


def flashdiff1_cudnn(call: AttentionCall) -> Tensor:
    """Compute attention with one call of cuDNN's attention per map, or a single call if the maps share K (V2)."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return flashdiff1(call)


def flash_attn(call: AttentionCall) -> Tensor:
    """Compute attention as `flashdiff2` does, with the `flash-attn` package in place of SDPA.

    The package supports float16 and bfloat16 on CUDA; padding is not supported.
    """
    from flash_attn import flash_attn_func

    def one_map(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        # flash-attn takes [B, length, heads, width]; its causal mask is right-aligned like ours.
        by_token = (x.transpose(1, 2) for x in (queries, keys, values))
        out: Tensor = flash_attn_func(*by_token, softmax_scale=call.scale, causal=True)
        return out.transpose(1, 2)

    return _attend_by_parts(call, one_map)


def prepare_sdpa(call: AttentionCall) -> MapAttention:
    """Return a function that computes one map's attention by torch's SDPA; a query that sees no key gets 0."""
    length, keys = call.query_count, call.key_count
    is_plain = call.mask.is_unpadded
    plainly_causal = is_plain and length == keys and not call.mask.is_window_effective(keys)
    visible = None if plainly_causal else call.mask.dense(length, keys, call.v.device)
    may_be_blind = not is_plain or length > keys
    blind = ~visible.any(-1, keepdim=True) if may_be_blind and visible is not None else None

    def one_map(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        out = scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=visible,
            is_causal=plainly_causal and length > 1,
            scale=call.scale,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )
        return out if blind is None else out.masked_fill(blind, 0.0)

    return one_map


def _attend_by_parts(call: AttentionCall, one_map: MapAttention) -> Tensor:
    """Split V into parts as wide as K, compute attention for each, and apply the pair norm to the joined result."""
    parts = call.v.split(call.q[0].shape[-1], -1)
    return pair_norm(torch.cat([combine_outputs(call, part, one_map) for part in parts], -1), call.post)


def combine_outputs(call: AttentionCall, v: Tensor, one_map: MapAttention) -> Tensor:
    """Compute each map's output and return g·signal output - λ·noise output, or the only map's output.

    Args:
        call: call that gives all but the values.
        v: values to use instead of the call's, such as a part of their channels.
        one_map: function that computes one map's output.
    """
    q, k = call.q, call.k
    if call.lam is None:
        return one_map(q[0], k[0], v)
    if call.shares_keys and call.signals_per_noise == 1:
        # Both queries of a pair use the same KV head, so one call with grouped heads computes both maps.
        both = one_map(torch.stack(tuple(q), 2).flatten(1, 2), k[0], v)
        signal, noise = both[:, 0::2], both[:, 1::2]
    else:
        signal, noise = (one_map(queries, keys, v) for queries, keys in zip(q, k, strict=True))
    if call.signal_gate is not None:
        signal = call.signal_gate.to(signal.dtype) * signal
    return torch.addcmul(signal, call.lam.to(signal.dtype), repeat_noise_heads(noise, call.pairs), value=-1)


def _cudnn_refuses(call: AttentionCall) -> str | None:
    if not call.v.is_cuda:
        return "cuDNN runs on CUDA only"
    if call.query_count != call.key_count or not call.mask.is_unpadded or call.mask.is_window_effective(call.key_count):
        return "cuDNN is used only for whole causal prompts without padding or window"
    grouped = call.shares_keys or call.q[0].shape[1] != call.v.shape[1]
    inputs = SDPAParams(call.q[0], call.k[0], call.v, None, 0.0, True, grouped)
    return None if can_use_cudnn_attention(inputs) else "torch's cuDNN attention does not support these tensors"


def _is_faster_by_cudnn(call: AttentionCall) -> bool:
    """Return whether cuDNN is faster than the fused prefill on this device, as measured, and free memory suffices."""
    if not call.v.is_cuda or call.maps != 2 or call.signals_per_noise != 1 or torch.compiler.is_compiling():
        return False
    shape = call.shares_keys, call.q[0].shape[-1]
    measured = [
        tokens for *known, tokens in FUSED_AGAINST_CUDNN if tuple(known) == shape and tokens <= call.query_count
    ]
    if not measured or FUSED_AGAINST_CUDNN[*shape, max(measured)] >= 1:
        return False
    device = call.v.device
    return torch.cuda.get_device_capability(device) == (9, 0) and 2 * _cudnn_bytes(call) <= _free_bytes(device)


def _cudnn_bytes(call: AttentionCall) -> int:
    """Estimate the memory of `flashdiff1` in bytes: four times its output, as measured."""
    return 4 * call.q[0].shape[:3].numel() * call.v.shape[-1] * call.v.element_size()


def _free_bytes(device: torch.device) -> int:
    """Return the bytes of device memory that are free, or reserved by torch but unused."""
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held


@cache
def _has_flash_attn() -> bool:
    """Return whether the flash-attn package is installed; cached, since every layer checks it at every step."""
    spec = find_spec("flash_attn")
    # With only flash-attn-4 installed, `flash_attn` is a namespace package: it has no file and not the function.
    return spec is not None and spec.origin is not None


def _find_flash_attn_refusal(call: AttentionCall) -> str | None:
    if not call.v.is_cuda:
        return "flash-attn runs on CUDA only"
    if call.v.dtype not in (torch.float16, torch.bfloat16):
        return f"flash-attn supports float16 and bfloat16, not {call.v.dtype}"
    if call.mask.keys is not None or call.mask.explicit is not None:
        return "diffquant does not call flash-attn with padding masks"
    if call.mask.is_window_effective(call.key_count):
        return "diffquant does not call flash-attn with windows"
    width, value_width = call.q[0].shape[-1], call.v.shape[-1]
    if width > _WIDEST or value_width % width:
        return (
            f"flash-attn supports keys up to {_WIDEST} wide and values as wide or a multiple as wide; here keys are "
            f"{width} and values {value_width} wide"
        )
    return None if _has_flash_attn() else "the flash-attn package is not installed: pip install flash-attn"


register(Backend("flashdiff1", flashdiff1))
register(Backend("flashdiff1-cudnn", flashdiff1_cudnn, _cudnn_refuses, priority=40, is_worthwhile=_is_faster_by_cudnn))
# SDPA's flash kernels need values as wide as keys; for wider ones SDPA computes full maps in memory. So `flashdiff2`
# makes separate calls for the halves of V. If values are as wide as keys, it makes no additional calls.
register(Backend("flashdiff2", flashdiff2, priority=10))
register(Backend("flash_attn", flash_attn, _find_flash_attn_refusal, priority=20))
