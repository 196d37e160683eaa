"""Peers: implementations of attention to compare, each with its input and its tolerance."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad

from diffquant.attention import BACKENDS, attend
from diffquant.attention.backends.composed import flashdiff1, flashdiff2
from diffquant.attention.naive import naive
from diffquant.benchmarks.workloads import Workload, make_differential_call, make_transformer_call
from diffquant.family.call import AttentionCall
from diffquant.recipe.scheme import FULL, Scheme

BASELINE = "Transformer, SDPA flash"
ROW_8 = Scheme.parse("8", "row")
ROW_SHIFT_8 = Scheme.parse("8:row:shift")
Attention = Callable[[AttentionCall], Tensor]


@dataclass(frozen=True)
class Peer:
    """An implementation of attention that the bench compares with others.

    Attributes:
        attention: function to time.
        make: makes the call that `attention` computes, for a workload and a device.
        logits: scheme of its logits, which backend `naive` also uses when results are compared.
        tolerance: largest allowed relative error against `naive`, for peers that quantize; by default the dtype's.
        missing: returns the reason why the peer cannot run a call, or None if it can.
        facts: returns further numbers about a call, by name, for `BenchCell.facts`.
    """

    attention: Attention
    make: Callable[[Workload, str], AttentionCall] = make_differential_call
    logits: Scheme = FULL
    tolerance: float | None = None
    missing: Callable[[AttentionCall], str | None] = lambda _: None
    facts: Callable[[AttentionCall], dict[str, float]] = lambda _: {}


def _sdpa(
    kind: str, make: Callable[[Workload, str], AttentionCall] = make_differential_call, composed: Attention = flashdiff1
) -> Peer:
    """Make a peer of torch's attention with one of its backends: "FLASH", "CUDNN" or "EFFICIENT"."""

    def attention(call: AttentionCall) -> Tensor:
        with sdpa_kernel(SDPBackend.__members__[f"{kind}_ATTENTION"]):
            return composed(call)

    return Peer(attention, make, missing=_flash_widths if kind == "FLASH" else only_cuda)


def _ours(name: str) -> Attention:
    def attention(call: AttentionCall) -> Tensor:
        return BACKENDS[name].compute(call)

    return attention


def _reason_of(name: str) -> Callable[[AttentionCall], str | None]:
    def missing(call: AttentionCall) -> str | None:
        try:
            return BACKENDS[name].refuses(call)
        except ImportError as error:
            return f"the kernel cannot be imported: {error}"

    return missing


def _kernel(
    name: str, make: Callable[[Workload, str], AttentionCall] = make_differential_call, tolerance: float | None = None
) -> Peer:
    """Make a peer of a backend of diffquant, which may not be installed or not support a call."""
    return Peer(_ours(name), make, tolerance=tolerance, missing=_reason_of(name))


def _simulate_logits(attention: Attention, logits: Scheme) -> Peer:
    """Make a peer that simulates the quantization of logits."""
    return Peer(lambda call: attention(replace(call, logits=logits)), logits=logits)


def _padded_call(work: Workload, device: str) -> AttentionCall:
    """Make a call with queries and keys padded to the width of values, as a flash kernel needs to compute a map."""
    call = make_differential_call(work, device)
    padding = (0, work.model.value_width - work.model.width)
    k = [pad(x, padding) for x in call.k]
    return replace(call, q=[pad(x, padding) for x in call.q], k=[k[0]] * 2 if call.shares_keys else k)


def only_cuda(call: AttentionCall) -> str | None:
    """Return why a call cannot run if it is not on CUDA."""
    return None if call.v.is_cuda else "it runs only on CUDA"


def _flash_widths(call: AttentionCall) -> str | None:
    return None if call.v.dtype != torch.float32 or not call.v.is_cuda else "flash attention on CUDA needs 16 bits"


PEERS: dict[str, Peer] = {
    BASELINE: _sdpa("FLASH", make_transformer_call),
    "Transformer, SDPA cuDNN": _sdpa("CUDNN", make_transformer_call),
    "Transformer, flash-attn": _kernel("flash_attn", make_transformer_call),
    "Transformer, flash-attn-4": _kernel("flash_attn_4", make_transformer_call),
    "DIFF, eager": Peer(_ours("naive")),
    "FlashDiffAttn_1": Peer(_ours("flashdiff1")),
    "FlashDiffAttn_1, SDPA mem-efficient": _sdpa("EFFICIENT"),
    "FlashDiffAttn_1, SDPA cuDNN": _sdpa("CUDNN"),
    "FlashDiffAttn_1, SDPA flash, keys padded": _sdpa("FLASH", _padded_call),
    "FlashDiffAttn_1, flash-attn-4": _kernel("flash_attn_4"),
    "FlashDiffAttn_2": Peer(_ours("flashdiff2")),
    "FlashDiffAttn_2, SDPA flash": _sdpa("FLASH", composed=flashdiff2),
    "FlashDiffAttn_2, SDPA cuDNN": _sdpa("CUDNN", composed=flashdiff2),
    "FlashDiffAttn_2, flash-attn": _kernel("flash_attn"),
    "DIFF, fused": _kernel("triton"),
    "DIFF, fused, int8 QK": _kernel("triton-int8", tolerance=0.05),
    "DIFF, fused, int8 QK, fp8 PV": _kernel("triton-fp8", tolerance=0.1),
    "DIFF, fused, specialized": _kernel("triton-specialized"),
    "DIFF, fused, int8 QK, fp8 PV, specialized": _kernel("triton-fp8-specialized", tolerance=0.1),
    "DIFF, simulated logits 8:row, eager": _simulate_logits(naive, ROW_8),
    **{f"DIFF, simulated logits {scheme}": _simulate_logits(attend, scheme) for scheme in (ROW_8, ROW_SHIFT_8)},
}
