"""Checks and prepares arguments of attention kernels, and registers prefill kernels as torch operators.

Shapes: B batch, T queries, S keys, h pairs, h_kv KV pairs, d query and key width, dv value width.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffquant.family.call import AttentionCall, dtype_name
from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm


def match_strides(*maps: Tensor) -> list[Tensor]:
    """Return the tensors with contiguous last axes and equal strides, copying only those that need it."""
    first = maps[0].stride()
    if first[-1] == 1 and all(x.stride() == first for x in maps):
        return list(maps)
    return [x.contiguous() for x in maps]


HALF_TYPES = (torch.float16, torch.bfloat16)


def call_refusal(call: AttentionCall) -> str | None:
    """Return why prefill kernels do not support a call, or None. Widths, dtypes and device are not checked."""
    if call.needs_gradient:
        return "the kernel has no backward pass; call it under torch.no_grad()"
    if call.signal_gate is not None:
        return "the signal map has a gate, which the kernel does not support"
    if call.signals_per_noise > 1:
        return f"{call.signals_per_noise} pairs share a noise head; give each pair its own: call expand_noise() first"
    if call.mask.explicit is not None:
        return "the kernel supports only causal masks, but the call has a mask per query"
    if call.mask.is_window_effective(call.key_count):
        seen = f"the newest {call.mask.window} of {call.key_count} keys"
        return f"the kernel supports no window, but queries see only {seen}"
    if call.mask.keys is not None and call.mask.valid_ranges is None:
        return "the padding mask has holes; the kernels support one range of keys per sequence"
    return None


def widths_refusal(q: Tensor, v: Tensor) -> str | None:
    """Return why prefill kernels do not support the dtype or widths of q [B, h, T, d] and v [B, h_kv, S, dv].

    None means that they do: d is 64 or 128, and dv is d or 2d.
    """
    if q.dtype not in HALF_TYPES:
        return f"q, k and v are {dtype_name(q.dtype)}; the kernel supports {' and '.join(map(dtype_name, HALF_TYPES))}"
    width, value_width = q.shape[-1], v.shape[-1]
    if width not in (64, 128):
        return f"q and k are {width} wide; the kernel supports head widths 64 and 128"
    if value_width not in (width, 2 * width):
        return f"v is {value_width} wide; with keys {width} wide the kernel supports {width} and {2 * width}"
    return None


# Most new tokens that decode kernels take.
MAX_QUERIES = 16


def list_decode_refusals(q: Sequence[Tensor], value_heads: int, mask: Mask) -> list[str]:
    """List the reasons why decode kernels do not support some queries and their mask.

    Args:
        q: queries, [B, h, T, d] per map.
        value_heads: number of heads of V.
        mask: mask of the call.
    """
    wrong = []
    if q[0].is_cuda and q[0].dtype not in HALF_TYPES:
        wrong.append(f"queries are {q[0].dtype}; the kernels support float16 and bfloat16 on CUDA")
    if len(q) == 2 and q[1].shape[1] % value_heads:
        wrong.append(f"{q[1].shape[1]} noise heads are not a multiple of {value_heads} value heads; repeat noise heads")
    if mask.explicit is not None:
        wrong.append("the kernels support only causal masks, but the call has a mask per query")
    if mask.keys is not None and mask.valid_ranges is None:
        wrong.append("the padding mask has holes; the kernels support one range of keys per sequence")
    if not 0 < q[0].shape[2] <= MAX_QUERIES:
        wrong.append(f"the kernels take 1 to {MAX_QUERIES} new tokens, not {q[0].shape[2]}; use prefill for more")
    if torch.is_grad_enabled() and any(x.requires_grad for x in q):
        wrong.append("the kernel has no backward pass; call it under torch.no_grad()")
    return wrong


def empty_output(q: Tensor, value_width: int) -> Tensor:
    """Allocate [B, h, T, dv] with memory order [B, T, h, dv], so that heads can be flattened without a copy."""
    batch, pairs, queries, _ = q.shape
    return q.new_empty(batch, queries, pairs, value_width).transpose(1, 2)


_PARTS = (
    "Tensor[] q, Tensor[] k, Tensor v, Tensor? lam, Tensor? starts, Tensor? ends, Tensor? weight, "
    "float scale, bool normed, float eps, float factor"
)


class Operands(NamedTuple):
    """Tensors and numbers of a call as kernels need them: contiguous channels, equal strides for both maps.

    Attributes:
        out: output to fill, [B, h, T, dv].
        q: queries, one [B, h, T, d] per map.
        k: keys, one [B, h_kv, S, d] per map, or a single one if two maps share keys (V2).
        v: values [B, h_kv, S, dv].
        lam: λ, float32 [B, h, T, 1], or None if there is one map.
        starts, ends: first valid key of each sequence and one past the last, int32 [B], or None if nothing is padded.
        weight: weight of the pair norm [dv], or None.
        scale: factor of Q·Kᵀ.
        normed: whether the pair norm is applied, with `eps` and `factor`.
    """

    out: Tensor
    q: list[Tensor]
    k: list[Tensor]
    v: Tensor
    lam: Tensor | None
    starts: Tensor | None
    ends: Tensor | None
    weight: Tensor | None
    scale: float
    normed: bool
    eps: float
    factor: float

    @property
    def is_empty(self) -> bool:
        """Whether the output is empty or there are no keys."""
        return self.out.numel() == 0 or self.v.shape[2] == 0


def register_operator(
    name: str,
    launch: Callable[..., Any],
    options: str = "",
    returns: str = "Tensor",
    fake: Callable[..., Any] = lambda out, *_: out,
) -> Callable[..., Any]:
    """Register a launch function as the torch operator `diffquant::name`.

    Args:
        name: name of the operator.
        launch: function of `Operands` and the options that computes the results, the output first.
        options: declaration of the options in torch's schema language, such as ", str pv".
        returns: declaration of the results in torch's schema language.
        fake: function of an uninitialized output, q and the options that returns results of the right shapes and
            dtypes, for torch.compile.

    Returns:
        A function of an `AttentionCall` and the options that calls the operator.
    """

    def run(q: list[Tensor], k: list[Tensor], v: Tensor, lam: Tensor | None, *rest: Any) -> Any:
        out = empty_output(q[0], v.shape[-1])
        lam = None if lam is None else lam.float().expand(*q[0].shape[:3], 1)
        (v,) = match_strides(v)
        return launch(Operands(out, match_strides(*q), match_strides(*k), v, lam, *rest[:7]), *rest[7:])

    op = torch.library.custom_op(f"diffquant::{name}", run, mutates_args=(), schema=f"({_PARTS}{options}) -> {returns}")
    op.register_fake(lambda q, _k, v, *rest: fake(empty_output(q[0], v.shape[-1]), q, *rest[8:]))

    def operator(call: AttentionCall, *given: Any) -> Any:
        norm = call.post or PairNorm(0.0)
        starts, ends = call.mask.valid_ranges or (None, None)
        k = list(call.k[:1] if call.shares_keys else call.k)
        numbers = (norm.weight, call.scale, call.post is not None, norm.eps, norm.factor)
        return op(list(call.q), k, call.v, call.lam, starts, ends, *numbers, *given)

    return operator
