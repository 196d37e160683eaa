"""The arguments of one attention computation: tensors, options, and checks that they fit together.

Shapes: B batch, T queries, S keys, h pairs, n noise heads, h_kv KV pairs, d query and key width, dv value width.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace

import torch
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.family.heads import repeat_noise_heads
from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm
from diffquant.recipe.scheme import FULL, Scheme

# Names of q, k and v in messages, by the number of maps.
_NAMES = {1: ("q", "k", "v"), 2: ("q1", "q2", "k1", "k2", "v")}


@dataclass
class LogitMeter:
    """Statistics of a layer's logit quantizer since the last reset.

    Counts stay on the device to avoid synchronization until `report` fetches them.

    Attributes:
        calls: number of attention calls with quantized logits.
        p_calls: number of attention calls with quantized softmax weights.
        entries: number of visible logits that were rounded, over both maps.
        clipped: number of these that were clipped, which only `shift`, static scales and block formats such as MX do.
        scale_sum, scale_count, scale_max: sum, number and maximum of the scales.
    """

    calls: int = 0
    p_calls: int = 0
    entries: int | Tensor = 0
    clipped: int | Tensor = 0
    scale_sum: float | Tensor = 0.0
    scale_count: int | Tensor = 0
    scale_max: float | Tensor = 0.0

    def add_counts(self, entries: int | Tensor, clipped: int | Tensor) -> None:
        """Add to the numbers of rounded and of clipped logits."""
        self.entries = self.entries + entries
        self.clipped = self.clipped + clipped

    def record_scales(self, scales: Tensor, largest: Tensor) -> None:
        """Add scales to the statistics, except where `largest`, the largest |logit| of each scale, is 0."""
        if not scales.numel():
            return
        used = largest > 0
        scales = torch.where(used, scales.detach(), 0.0)
        self.scale_sum = self.scale_sum + scales.sum(dtype=torch.float64)
        self.scale_count = self.scale_count + used.sum()
        self.scale_max = scales.amax().clamp(min=self.scale_max)

    def report(self) -> dict[str, float]:
        """Return the statistics by name: calls, entries, clipped, and the mean and largest scale.

        The scales' keys are step_mean and step_max, as in stored results.
        """
        count = int(self.scale_count)
        return {
            "calls": self.calls,
            "entries": int(self.entries),
            "clipped": int(self.clipped),
            "step_mean": float(self.scale_sum) / count if count else 0.0,
            "step_max": float(self.scale_max),
        }


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of norm((g·softmax(Q1·K1ᵀ·scale) - λ·softmax(Q2·K2ᵀ·scale))·V); with one map, without the λ term.

    The first map is the signal map, the second the noise map. A pair is a query head of the signal map and the noise
    head subtracted from it.

    Attributes:
        q: queries of one or two maps, each [B, h, T, d] with any strides. With n noise heads, each of which serves
            h / n pairs, the second map's are [B, n, T, d].
        k: keys, one [B, h_kv, S, d] per map; the same tensor twice if the maps share keys (V2). h_kv divides n.
        v: values [B, h_kv, S, dv].
        lam: λ, broadcastable to [B, h, T, 1], or None if there is one map.
        scale: factor of Q·Kᵀ.
        mask: which keys each query sees; the output of a query that sees no key is 0.
        post: norm of each pair's output, or None.
        logits: number format and granularity of both maps' logits; 16 bits leave them unchanged.
        p: number format of the softmax weights, which are rounded before they are divided by their row's sum.
        qk: number format of the queries and keys if the backend quantizes them. Other backends get operands that were
            quantized before the call.
        ranges: calibrated largest |logit| of each head, [h] with one map or [h + n] with two; for static schemes only.
        meter: counter of quantized logits and of calls with quantized softmax weights, or None.
        signal_gate: factor g of the signal map, broadcastable to [B, h, T, 1], or None if g is 1.

    Raises:
        UsageError: tensors disagree in number, shape, dtype or device; the message lists every disagreement.
    """

    q: Sequence[Tensor]
    k: Sequence[Tensor]
    v: Tensor
    lam: Tensor | None
    _: KW_ONLY
    scale: float
    mask: Mask
    post: PairNorm | None = None
    logits: Scheme = FULL
    p: Scheme = FULL
    qk: Scheme = FULL
    ranges: Tensor | None = None
    meter: LogitMeter | None = None
    signal_gate: Tensor | None = None

    def __post_init__(self) -> None:
        check_tensors(self.q, self.k, self.v, self.lam, self.mask, self.post, self.signal_gate)
        if self.logits.sharing.is_static:
            heads = sum(x.shape[1] for x in self.q)
            if self.ranges is None or self.ranges.numel() != heads:
                raise UsageError(f"logits at {self.logits} need {heads} calibrated ranges, one per head of each map")

    @property
    def has_quantized_maps(self) -> bool:
        """Whether logits, softmax weights, queries or keys are quantized during this call."""
        return self.logits.quantizes or self.p.quantizes or self.qk.quantizes

    def record_in_meter(self) -> None:
        """Count this call in its meter, if any, as one with quantized logits, quantized softmax weights, or both."""
        if self.meter is not None:
            self.meter.calls += int(self.logits.quantizes)
            self.meter.p_calls += int(self.p.quantizes)

    @property
    def maps(self) -> int:
        """Number of maps, 1 or 2."""
        return len(self.q)

    @property
    def pairs(self) -> int:
        """Number of pairs, h; with one map, number of query heads."""
        return self.q[0].shape[1]

    @property
    def signals_per_noise(self) -> int:
        """Number of pairs that share a noise head; 1 with one map."""
        return self.pairs // self.q[-1].shape[1]

    def expand_noise(self) -> "AttentionCall":
        """Return a call in which each pair has its own noise head: shared ones are repeated.

        If none are shared, this call is returned.
        """
        if self.signals_per_noise == 1:
            return self
        ranges = self.ranges
        if ranges is not None:
            noise = repeat_noise_heads(ranges[None, self.pairs :], self.pairs)
            ranges = torch.cat([ranges[: self.pairs], noise[0]])
        return replace(self, q=(self.q[0], repeat_noise_heads(self.q[1], self.pairs)), ranges=ranges)

    @property
    def query_count(self) -> int:
        """Number of queries T."""
        return self.q[0].shape[2]

    @property
    def key_count(self) -> int:
        """Number of keys S."""
        return self.v.shape[2]

    @property
    def shares_keys(self) -> bool:
        """Whether there are two maps with the same keys (V2)."""
        return self.maps == 2 and self.k[0] is self.k[1]

    @property
    def needs_gradient(self) -> bool:
        """Whether autograd records this call."""
        tensors = (*self.q, *self.k, self.v, self.lam, self.signal_gate)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def check_tensors(
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Tensor,
    lam: Tensor | None,
    mask: Mask,
    post: PairNorm | None,
    signal_gate: Tensor | None = None,
) -> None:
    """Check that the tensors of an attention call fit together.

    The arguments are the attributes of `AttentionCall` with these names.

    Raises:
        UsageError: tensors disagree in number, shape, dtype or device; the message lists every disagreement.
    """
    maps = len(q)
    if maps not in (1, 2) or len(k) != maps or (lam is None) != (maps == 1) or (maps == 1 and signal_gate is not None):
        raise UsageError(
            "attention takes one map without λ or two maps with it, and a signal gate only with two maps; got "
            f"{maps} Q, {len(k)} K, λ: {lam is not None}, gate: {signal_gate is not None}"
        )
    # This runs in each layer for each decoded token, so messages are built only if a check fails.
    names, attended = _NAMES[maps], (*q, *k, v)
    not_of_four_axes = [f"{name} {list(x.shape)}" for name, x in zip(names, attended, strict=True) if x.dim() != 4]
    if not_of_four_axes:
        raise UsageError(f"attention: tensors are [batch, heads, length, width]; got {', '.join(not_of_four_axes)}")
    batch, pairs, queries, width = q[0].shape
    _, kv_pairs, keys, value_width = v.shape
    noises = q[-1].shape[1]
    of_signal, of_noise = (batch, pairs, queries, width), (batch, noises, queries, width)
    of_keys, of_values = (batch, kv_pairs, keys, width), (batch, kv_pairs, keys, value_width)
    shapes = (of_signal, *(of_noise,) * (maps - 1), *(of_keys,) * maps, of_values)
    wrong = [
        f"{name} {list(x.shape)}, not {list(shape)}"
        for name, x, shape in zip(names, attended, shapes, strict=True)
        if x.shape != shape
    ]
    for name, weight in (("lam", lam), ("signal_gate", signal_gate)):
        if weight is not None and not _broadcasts(weight.shape, (batch, pairs, queries, 1)):
            wrong.append(f"{name} {list(weight.shape)}, not one value or {[batch, pairs, queries, 1]}")
    valid = mask.keys
    # A cache may hold more key slots than the mask covers: slots for future tokens.
    if valid is not None and (valid.dtype != torch.bool or valid.dim() != 2 or valid.shape[0] != batch):
        wrong.append(f"mask {valid.dtype} {list(valid.shape)}, not torch.bool {[batch, keys]}")
    seen = mask.explicit
    if seen is not None and (
        seen.dtype != torch.bool or seen.shape[1:] != (1, queries, keys) or seen.shape[0] not in (1, batch)
    ):
        wrong.append(f"mask {seen.dtype} {list(seen.shape)}, not torch.bool {[batch, 1, queries, keys]}")
    if mask.window is not None and mask.window < 1:
        wrong.append(f"window {mask.window}, expected a positive number of keys")
    norm_weight = post.weight if post else None
    if norm_weight is not None and norm_weight.shape != (value_width,):
        wrong.append(f"norm weight {list(norm_weight.shape)}, not {[value_width]}")
    if wrong:
        raise UsageError(f"attention: q is {list(q[0].shape)}, v {list(v.shape)}: {'; '.join(wrong)}")
    if kv_pairs == 0 or pairs % kv_pairs:
        raise UsageError(f"attention: {kv_pairs} KV pairs do not divide {pairs} query pairs")
    if noises == 0 or pairs % noises or noises % kv_pairs:
        raise UsageError(
            f"attention: {noises} noise heads must divide {pairs} query pairs and be a multiple of {kv_pairs} KV pairs"
        )
    _require_one_place(names, attended, (lam, signal_gate, valid if seen is None else seen, norm_weight))


def _broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    return len(shape) <= len(target) and all(
        size in (1, wanted) for size, wanted in zip(reversed(shape), reversed(target), strict=False)
    )


def _require_one_place(names: Sequence[str], attended: Sequence[Tensor], beside: Sequence[Tensor | None]) -> None:
    """Check that Q, K and V share a dtype, and that all tensors are on one device."""
    first = attended[0]
    if any(x.dtype != first.dtype for x in attended):
        dtypes = (f"{name} is {dtype_name(x.dtype)}" for name, x in zip(names, attended, strict=True))
        raise UsageError(f"attention: {', '.join(dtypes)}; use one dtype")
    if any(x is not None and x.device != first.device for x in (*attended, *beside)):
        placed = zip((*names, "lam", "signal_gate", "mask", "norm weight"), (*attended, *beside), strict=True)
        devices = (f"{name} is on {x.device}" for name, x in placed if x is not None)
        raise UsageError(f"attention: {', '.join(devices)}; use one device")


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name for messages, such as "float16"."""
    return str(dtype).removeprefix("torch.")
