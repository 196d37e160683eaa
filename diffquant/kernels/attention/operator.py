"""Prefill kernels as operators of torch, which a trace keeps whole: a call taken apart, whose output a launch fills."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diffquant.family.call import AttentionCall
from diffquant.family.norm import PairNorm
from diffquant.kernels.arguments import empty_output
from diffquant.kernels.strides import same_strides

_PARTS = (
    "Tensor[] q, Tensor[] k, Tensor v, Tensor? lam, Tensor? starts, Tensor? ends, Tensor? weight, "
    "float scale, bool normed, float eps, float factor"
)


class Operands(NamedTuple):
    """A call taken apart, as kernels address it: each map's tensors have contiguous channels and the same strides.

    Attributes:
        out: output to fill, [B, h, T, dv].
        q: queries, one [B, h, T, d] a map.
        k: keys, one [B, h_kv, S, d] a map, or one alone where two maps share them (V2).
        v: values [B, h_kv, S, dv].
        lam: λ, float32 [B, h, T, 1]; None with one map.
        starts, ends: range of each sequence's valid keys, int32 [B]; None without padding.
        weight: weight of the pair norm [dv], or None.
        scale: factor of Q·Kᵀ.
        normed: whether pairs are normed, with `eps` and `factor`.
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
    def is_blind(self) -> bool:
        """Whether there is nothing to compute, or nothing to see."""
        return self.out.numel() == 0 or self.v.shape[2] == 0


def as_operator(
    name: str,
    launch: Callable[..., Any],
    options: str = "",
    returns: str = "Tensor",
    fake: Callable[..., Any] = lambda out, *_: out,
) -> Callable[..., Any]:
    """A function of a call and options that runs a launch as the operator `diffquant::name`.

    Args:
        name: name of the operator.
        launch: function of `Operands` and the options; it returns the output, first among `returns`.
        options: declaration of the options in torch's schema language, such as ", str pv".
        returns: declaration of what is returned.
        fake: function of an empty output, q and the options that gives what is returned, without values.
    """

    def run(q: list[Tensor], k: list[Tensor], v: Tensor, lam: Tensor | None, *rest: Any) -> Any:
        out = empty_output(q[0], v.shape[-1])
        lam = None if lam is None else lam.float().expand(*q[0].shape[:3], 1)
        (v,) = same_strides(v)
        return launch(Operands(out, same_strides(*q), same_strides(*k), v, lam, *rest[:7]), *rest[7:])

    op = torch.library.custom_op(f"diffquant::{name}", run, mutates_args=(), schema=f"({_PARTS}{options}) -> {returns}")
    op.register_fake(lambda q, _k, v, *rest: fake(empty_output(q[0], v.shape[-1]), q, *rest[8:]))

    def operator(call: AttentionCall, *given: Any) -> Any:
        norm = call.post or PairNorm(0.0)
        starts, ends = call.mask.ranges or (None, None)
        k = list(call.k[:1] if call.shares_keys else call.k)
        numbers = (norm.weight, call.scale, call.post is not None, norm.eps, norm.factor)
        return op(list(call.q), k, call.v, call.lam, starts, ends, *numbers, *given)

    return operator
