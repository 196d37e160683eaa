"""Peers: ways to compute an attention, each with its call, its counts, and the check it must pass to be timed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad

from diffquant.attention import BACKENDS, attend
from diffquant.attention.backends.composed import flashdiff1, flashdiff2
from diffquant.attention.naive import naive
from diffquant.bench.contest import counts, diffllama
from diffquant.bench.contest.counts import Count
from diffquant.bench.contest.workloads import Workload, differential, transformer
from diffquant.family.call import AttentionCall
from diffquant.scheme import FULL, Scheme

BASELINE = "Transformer, SDPA flash"
ROW_8 = Scheme.parse("8", "row")
ROW_SHIFT_8 = Scheme.parse("8:row:shift")
Attention = Callable[[AttentionCall], Tensor]


@dataclass(frozen=True)
class Peer:
    """A way to compute an attention.

    Attributes:
        attention: function that is timed.
        make: maker of its call on a device.
        count: counter of its operations and bytes.
        logits: rounding that `naive` must do for a fair comparison.
        tolerance: relative error against `naive` in place of the dtype's own, where rounding is meant.
        missing: check that gives the reason why it cannot run a call, or None.
        facts: further numbers of a call.
    """

    attention: Attention
    make: Callable[[Workload, str], AttentionCall]
    count: Callable[[Workload], Count]
    logits: Scheme = FULL
    tolerance: float | None = None
    missing: Callable[[AttentionCall], str | None] = lambda _: None
    facts: Callable[[AttentionCall], dict[str, float]] = lambda _: {}


def _sdpa(backend: SDPBackend, composed: Attention = flashdiff1) -> Attention:
    def attention(call: AttentionCall) -> Tensor:
        with sdpa_kernel(backend):
            return composed(call)

    return attention


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
    name: str,
    make: Callable[[Workload, str], AttentionCall] = differential,
    count: Callable[[Workload], Count] = counts.fused,
    tolerance: float | None = None,
) -> Peer:
    """A backend that may be absent, or refuse a call."""
    return Peer(_ours(name), make, count, tolerance=tolerance, missing=_reason_of(name))


def _simulated(scheme: Scheme) -> Attention:
    return lambda call: attend(replace(call, logits=scheme))


def _rounded_eagerly(call: AttentionCall) -> Tensor:
    return naive(replace(call, logits=ROW_8))


def _padded(work: Workload, device: str) -> AttentionCall:
    """Keys as wide as values, so that a flash kernel takes a map in one call; padded beforehand."""
    call = differential(work, device)
    padding = (0, work.model.value_width - work.model.width)
    k = [pad(x, padding) for x in call.k]
    return replace(call, q=[pad(x, padding) for x in call.q], k=[k[0]] * 2 if call.k[0] is call.k[1] else k)


def _only_cuda(call: AttentionCall) -> str | None:
    return None if call.v.is_cuda else "it runs on CUDA alone"


def _flash_widths(call: AttentionCall) -> str | None:
    return None if call.v.dtype != torch.float32 or not call.v.is_cuda else "flash attention on CUDA takes half types"


def _flex(call: AttentionCall) -> Tensor:
    """FlexAttention, compiled; two calls, since it takes dv other than d."""
    outputs: list[Tensor] = [
        _compiled_flex()(q, k, call.v, block_mask=_causal_block(call), enable_gqa=q.shape[1] != k.shape[1])
        for q, k in zip(call.q, call.k, strict=True)
    ]
    return outputs[0] if call.lam is None else outputs[0] - call.lam.to(outputs[0].dtype) * outputs[1]


_flex_cache: dict[Any, Any] = {}


def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    if "compiled" not in _flex_cache:
        _flex_cache["compiled"] = torch.compile(flex_attention)
    return _flex_cache["compiled"]


def _causal_block(call: AttentionCall) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    queries, keys = call.length, call.v.shape[2]
    if (queries, keys) not in _flex_cache:
        _flex_cache[queries, keys] = create_block_mask(
            lambda _batch, _head, i, j: j <= i + (keys - queries), None, None, queries, keys, device=str(call.v.device)
        )
    return _flex_cache[queries, keys]


PEERS: dict[str, Peer] = {
    BASELINE: Peer(_sdpa(SDPBackend.FLASH_ATTENTION), transformer, counts.transformer, missing=_flash_widths),
    "Transformer, SDPA cuDNN": Peer(
        _sdpa(SDPBackend.CUDNN_ATTENTION), transformer, counts.transformer, missing=_only_cuda
    ),
    "Transformer, flash-attn": _kernel("flash_attn", transformer, counts.transformer),
    "DIFF, eager": Peer(_ours("naive"), differential, counts.eager),
    "FlashDiffAttn_1": Peer(_ours("flashdiff1"), differential, counts.two_calls),
    "FlashDiffAttn_1, SDPA mem-efficient": Peer(
        _sdpa(SDPBackend.EFFICIENT_ATTENTION), differential, counts.two_calls, missing=_only_cuda
    ),
    "FlashDiffAttn_1, SDPA cuDNN": Peer(
        _sdpa(SDPBackend.CUDNN_ATTENTION), differential, counts.two_calls, missing=_only_cuda
    ),
    "FlashDiffAttn_1, SDPA flash, keys padded": Peer(
        _sdpa(SDPBackend.FLASH_ATTENTION), _padded, counts.two_calls, missing=_flash_widths
    ),
    "FlashDiffAttn_1, FlexAttention": Peer(_flex, differential, counts.two_calls, missing=_only_cuda),
    "FlashDiffAttn_2": Peer(_ours("flashdiff2"), differential, counts.four_calls),
    "FlashDiffAttn_2, SDPA flash": Peer(
        _sdpa(SDPBackend.FLASH_ATTENTION, flashdiff2), differential, counts.four_calls, missing=_flash_widths
    ),
    "FlashDiffAttn_2, SDPA cuDNN": Peer(
        _sdpa(SDPBackend.CUDNN_ATTENTION, flashdiff2), differential, counts.four_calls, missing=_only_cuda
    ),
    "FlashDiffAttn_2, flash-attn": _kernel("flash_attn", count=counts.four_calls),
    **{
        f"transformers' DiffLlama, {how}": Peer(
            diffllama.attention, partial(diffllama.make_call, how), count, missing=diffllama.missing
        )
        for how, count in (("eager", counts.eager_halves), ("sdpa", counts.four_calls))
    },
    "DIFF, fused": _kernel("triton"),
    "DIFF, fused, int8 QK": _kernel("triton-int8", tolerance=0.05),
    "DIFF, fused, int8 QK, fp8 PV": _kernel("triton-fp8", tolerance=0.1),
    "DIFF, fused, specialized": _kernel("triton-specialized"),
    "DIFF, fused, pipelined": _kernel("triton-pipelined"),
    "DIFF, fused, int8 QK, fp8 PV, specialized": _kernel("triton-fp8-specialized", tolerance=0.1),
    "DIFF, simulated logits 8:row, eager": Peer(_rounded_eagerly, differential, counts.eager, logits=ROW_8),
    **{
        f"DIFF, simulated logits {scheme}": Peer(_simulated(scheme), differential, counts.simulated, logits=scheme)
        for scheme in (ROW_8, ROW_SHIFT_8)
    },
}
# Rounding differs where two ways disagree in the last bit before it.
_SIMULATED_SLACK = 5e-3
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
_CHECKED_QUERIES = 128


def tolerance(peer: Peer, dtype: torch.dtype) -> float:
    """Largest relative error against `naive` at which a peer is timed."""
    return peer.tolerance or TOLERANCES[dtype] + (_SIMULATED_SLACK if peer.logits.quantizes else 0.0)


def relative_error(peer: Peer, call: AttentionCall) -> float:
    """Relative error ||peer - naive|| / ||naive|| of a call's first and last queries; infinite if not finite.

    Few queries need no whole map. Their logits have a scale a row, so that queries can be computed alone.
    """
    out = peer.attention(call)
    if out.shape != (*call.q[0].shape[:3], call.v.shape[-1]) or not bool(out.isfinite().all()):
        return float("inf")
    length, keys = call.length, call.v.shape[2]
    rows = min(_CHECKED_QUERIES, length)
    past = keys - length
    wrong = norm = 0.0
    for first, seen in {(0, past + rows), (length - rows, keys)}:
        part = slice(first, first + rows)
        wanted = _naive(call, part, seen, peer.logits).double()
        wrong += float((out[:, :, part].double() - wanted).square().sum())
        norm += float(wanted.square().sum())
    return float((wrong / norm) ** 0.5)


def _naive(call: AttentionCall, rows: slice, keys: int, logits: Scheme) -> Tensor:
    """Output of `naive` in float32 for some queries, which are the last of the keys they see."""
    lam = call.lam if call.lam is None or call.lam.dim() < 4 else call.lam[:, :, rows]
    k = [x[:, :, :keys].float() for x in call.k]
    return naive(
        replace(
            call,
            q=[x[:, :, rows].float() for x in call.q],
            k=[k[0], k[0]] if call.shares_keys else k,
            v=call.v[:, :, :keys].float(),
            lam=lam,
            logits=logits,
        )
    )


def failure(error: Exception) -> str:
    """Text of an error: its type and the beginning of its first line."""
    first = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {first if len(first) < 160 else first[:157] + '...'}"
