"""Random calls of the attention kernels, and what they must give by the plain form in float64."""

from collections.abc import Sequence

import torch
from torch import Tensor

from diffquant.attention import Mask
from diffquant.attention.naive import naive
from diffquant.family.norm import PairNorm
from diffquant.kernels.arguments import Visibility


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


def limits(values: list[int], device: str | torch.device = "cpu") -> Tensor:
    """int32 positions, as `Visibility.starts` and `.ends` want them."""
    return torch.tensor(values, dtype=torch.int32, device=device)


def expected(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Tensor,
    lam: Tensor | None,
    *,
    scale: float,
    seen: Visibility,
    post: PairNorm | None = None,
) -> Tensor:
    """[B, h, T, dv] float64."""
    wide = [x.double() for x in q], [x.double() for x in k], v.double(), None if lam is None else lam.double()
    out = naive(*wide, scale, mask_of(seen, v.shape[2], v.device))
    return out if post is None else normed(out, post)


def mask_of(seen: Visibility, keys: int, device: str | torch.device) -> Mask:
    """The mask that shows what `seen` does."""
    if seen.starts is None and seen.ends is None:
        return Mask(causal=seen.causal, window=seen.window)
    column = torch.arange(keys, device=device)
    first = 0 if seen.starts is None else seen.starts[:, None]
    end = keys if seen.ends is None else seen.ends[:, None]
    return Mask(causal=seen.causal, window=seen.window, keys=(column >= first) & (column < end))


def normed(out: Tensor, post: PairNorm) -> Tensor:
    """What a pair's norm makes of an output [B, h, T, dv]."""
    out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + post.eps) * post.factor
    return out if post.weight is None else out * post.weight.to(out.dtype)


def relative_error(out: Tensor, wanted: Tensor) -> float:
    """Frobenius norm of the difference over that of what is wanted; infinite where anything is not finite."""
    if not out.isfinite().all():
        return float("inf")
    return float((out.double() - wanted).norm() / wanted.norm())
