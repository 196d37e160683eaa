"""Random calls of the attention kernels, and the results the plain form gives for them in float64."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil, log2
from typing import Any

import torch
from torch import Tensor

from diffquant.attention import LogitMeter
from diffquant.attention.naive import naive
from diffquant.attention.operands import round_operands
from diffquant.family.call import AttentionCall
from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm
from diffquant.recipe.scheme import FULL, Scheme

CAUSAL = Mask()


def random_call(
    generation: str,
    queries: int,
    keys: int,
    *,
    width: int = 64,
    pairs: int = 2,
    kv_pairs: int = 1,
    batch: int = 1,
    dtype: torch.dtype = torch.float16,
    device: str = "cpu",
) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor | None]:
    """q, k, v and λ of a "plain", "v1" or "v2" call, heads beside tokens in memory as projections leave them."""
    generator = torch.Generator(device).manual_seed(0)

    def heads(count: int, length: int, wide: int) -> Tensor:
        rows = torch.randn(batch, length, count, wide, generator=generator, device=device)
        return rows.to(dtype).transpose(1, 2)

    maps = 1 if generation == "plain" else 2
    q = list(heads(maps * pairs, queries, width).unflatten(1, (pairs, maps)).unbind(2))
    if generation == "v2":
        k = [heads(kv_pairs, keys, width)] * 2
    else:
        k = list(heads(maps * kv_pairs, keys, width).unflatten(1, (kv_pairs, maps)).unbind(2))
    v = heads(kv_pairs, keys, 2 * width if generation == "v1" else width)
    lam = {
        "plain": None,
        "v1": torch.tensor(0.37, device=device),
        "v2": torch.rand(batch, pairs, queries, 1, generator=generator, device=device),
    }
    return q, k, v, lam[generation]


def whole_numbers(
    generation: str, queries: int, keys: int, **shape: Any
) -> tuple[list[Tensor], list[Tensor], Any, Any]:
    """Inputs whose dot products float32 holds exactly, in any order of summation."""
    q, k, v, lam = random_call(generation, queries, keys, **shape)
    rounded = {id(x): x.mul(2).round() for x in k}
    return [x.mul(2).round() for x in q], [rounded[id(x)] for x in k], v, lam


def with_odd_strides(q: list[Tensor], k: list[Tensor], v: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """The same numbers in memory as no projection leaves them; no descriptor can read v's rows, at odd addresses."""
    apart = k[0].repeat_interleave(2, -1)[..., ::2]
    return [q[0], q[1].contiguous()], [apart, apart if k[0] is k[1] else k[1]], torch.cat([v[..., :1], v], -1)[..., 1:]


def fill_unseen(q: list[Tensor], k: list[Tensor], v: Tensor, first: int, last: int) -> None:
    """Fill positions before `first` with NaN and those from `last` on with infinity."""
    for x in {id(x): x for x in (*q, *k, v)}.values():
        x[:, :, :first] = torch.nan
        x[:, :, last:] = torch.inf


def kept_operators(model: Callable[..., Tensor], inputs: Sequence[Any]) -> list[object]:
    """What the nodes of a compiled model's one graph call, where it gives what the model gives."""
    graphs: list[Any] = []

    def keep(graph: Any, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    assert torch.equal(torch.compile(model, backend=keep, fullgraph=True)(*inputs), model(*inputs))
    return [node.target for node in graphs[0].graph.nodes]


def operator_arguments(generation: str) -> tuple[object, ...]:
    """What every prefill operator takes before its options: a call with padding and a norm, taken apart."""
    q, k, v, lam = random_call(generation, 17, 33)
    ends, weight = torch.tensor([30], dtype=torch.int32), torch.ones(v.shape[-1])
    return q, k[:1] if generation == "v2" else k, v, lam, None, ends, weight, 0.125, True, 1e-5, 0.8


def padding(
    keys: int,
    starts: Sequence[int] | None = None,
    ends: Sequence[int] | None = None,
    device: str | torch.device = "cpu",
) -> Mask:
    """A mask whose sequences hold positions from `starts` up to `ends`."""
    position = torch.arange(keys, device=device)
    first, last = (None if at is None else torch.tensor(at, device=device)[:, None] for at in (starts, ends))
    return Mask((position >= (0 if first is None else first)) & (position < (keys if last is None else last)))


# Keys, new queries and what these see of a store.
VISIBLE = {
    "chunk": (100, 3, CAUSAL),
    "one key": (1, 1, CAUSAL),
    "more queries than keys": (5, 9, CAUSAL),
    "left padding": (100, 2, padding(100, starts=[0, 41])),
    "padded queries": (64, 5, padding(64, starts=[60, 62])),
    "nothing to see": (17, 1, padding(17, starts=[17, 3])),
    "ragged": (40, 6, padding(40, starts=[3, 0], ends=[40, 37])),
    "window": (300, 2, Mask(window=70)),
    "window of its own key": (100, 1, Mask(window=1)),
    "window beyond the first key": (20, 3, Mask(window=50)),
    "ragged window": (200, 3, replace(padding(200, starts=[0, 150], ends=[199, 200]), window=33)),
}


def on_call(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A kernel as a function of a call's parts."""

    def run(
        q: Sequence[Tensor],
        k: Sequence[Tensor],
        v: Tensor,
        lam: Tensor | None,
        *,
        scale: float,
        mask: Mask = CAUSAL,
        post: PairNorm | None = None,
        scheme: Scheme = FULL,
        qk: Scheme = FULL,
        meter: LogitMeter | None = None,
        **options: Any,
    ) -> Tensor:
        return kernel(
            AttentionCall(q, k, v, lam, scale=scale, mask=mask, post=post, logits=scheme, p=FULL, qk=qk, meter=meter),
            **options,
        )

    return run


def expected(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Tensor,
    lam: Tensor | None,
    *,
    scale: float,
    mask: Mask = CAUSAL,
    post: PairNorm | None = None,
) -> Tensor:
    """Output [B, h, T, dv] of `naive` in float64."""
    wide = [x.double() for x in q], [x.double() for x in k], v.double(), None if lam is None else lam.double()
    out = naive(AttentionCall(*wide, scale=scale, mask=mask))
    return out if post is None else normed(out, post)


def steps_of_two(
    q: Sequence[Tensor], k: Sequence[Tensor], v: Tensor, lam: Tensor | None, qk: Scheme
) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor | None]:
    """A call whose queries and keys have scales that are powers of two, one a token and head."""

    def with_largest(x: Tensor) -> Tensor:
        x = x.clamp(-3.4, 3.4)
        x[..., 5] = 4.0 if qk.format.block else qk.format.largest * 2.0 ** (2 - ceil(log2(qk.format.largest)))
        return x

    changed = {id(x): with_largest(x.clone()) for x in (*q, *k)}
    return [changed[id(x)] for x in q], [changed[id(x)] for x in k], v, lam


def expected_of_rounded(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Tensor,
    lam: Tensor | None,
    scale: float,
    mask: Mask,
    qk: Scheme,
    *,
    logits: Scheme = FULL,
    p: Scheme = FULL,
) -> Tensor:
    """Output [B, h, T, dv] of `naive` over queries and keys that were rounded first, each map by itself."""
    maps = [round_operands(x, y, mask, qk) for x, y in zip(q, k, strict=True)]
    keys = [maps[0][1]] * len(k) if k[0] is k[-1] else [y for _, y in maps]
    queries = [x for x, _ in maps]
    return naive(AttentionCall(queries, keys, v.float(), lam, scale=scale, mask=mask, logits=logits, p=p)).double()


def normed(out: Tensor, post: PairNorm) -> Tensor:
    """Output [B, h, T, dv] after the pairs' norm."""
    out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + post.eps) * post.factor
    return out if post.weight is None else out * post.weight.to(out.dtype)


def relative_error(out: Tensor, wanted: Tensor) -> float:
    """Frobenius norm of the difference over that of what is wanted; infinite where anything is not finite."""
    if not out.isfinite().all():
        return float("inf")
    return float((out.double() - wanted).norm() / wanted.norm())
