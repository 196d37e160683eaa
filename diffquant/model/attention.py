"""The attention modules that a `DiffSpec` describes: λ, the maps and the norm, and a Transformer's projections.

Parameters keep the row order of the checkpoint they came from; the spec's `layout` says how to see heads in it.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.utils.generic import maybe_autocast

from diffquant.attention import BACKENDS, LogitMeter, backend_for
from diffquant.attention.operands import rounded_operands, rounded_values
from diffquant.family.call import AttentionCall
from diffquant.family.heads import HeadLayout
from diffquant.family.lam import LAMBDA_VECTORS, lam_from_vectors
from diffquant.family.mask import Mask
from diffquant.family.norm import PairNorm
from diffquant.family.spec import DiffSpec
from diffquant.model.blocks import AttentionBlock
from diffquant.model.fused_cache import FusedCache
from diffquant.model.linears import add_linears
from diffquant.numbers.rotation import rotated
from diffquant.scheme import FULL


class PairAttention(nn.Module):
    """Attention of a layer between heads that are projected already: λ, logits under a recipe, and the norm of a pair.

    Attributes:
        layer: number of the layer among all layers.
        scale: factor of Q·Kᵀ, the specification's.
        backend: name of the backend that computes it, or "auto".
        logits: scheme of the logits.
        logit_ranges: ranges of a static scheme.
        qk: scheme of queries and keys.
        p: scheme of softmax weights.
        pv: scheme of the values that they are multiplied with.
        qk_calls, pv_calls: number of attentions whose queries and keys, or values, were rounded.
        meter: counter of what is rounded.
        calls: list that every call is added to, which then keeps to the backends; None to keep none.
        key_rotation, value_rotation: matrices [d, d] and [dv, dv] that keys and values are rotated by before they are
            stored; None for none.
        lam_init: λ_init of the layer; 0 where λ has none.
        post_factor: factor behind the norm of a pair.
    """

    def __init__(self, spec: DiffSpec, layer: int) -> None:
        super().__init__()
        self.spec = spec
        self.layout: HeadLayout = spec.layout
        self.layer = layer
        self.scale = spec.scale
        # Numbers of the layer, and not functions of which it is: torch.compile then serves all layers with one graph.
        self.lam_init = spec.lam_init(layer) if spec.lam == "exp" else 0.0
        self.post_factor = spec.post_factor(layer)
        self.backend = "auto"
        self.logits = FULL
        self.logit_ranges: Tensor | None = None
        self.qk = self.p = self.pv = FULL
        self.qk_calls = self.pv_calls = 0
        self.key_rotation: Tensor | None = None
        self.value_rotation: Tensor | None = None
        self.meter = LogitMeter()
        self.calls: list[AttentionCall] | None = None
        if spec.lam == "exp":
            for name in LAMBDA_VECTORS:
                self.register_parameter(name, nn.Parameter(torch.empty(spec.head_dim)))
        if spec.post_norm == "affine":
            self.subln = LlamaRMSNorm(spec.value_dim, spec.post_norm_eps)

    @property
    def rounds(self) -> bool:
        """Whether something between the projections and the output is rounded, but for the cache."""
        return any(scheme.quantizes for scheme in (self.logits, self.qk, self.p, self.pv))

    @property
    def calls_backend(self) -> str:
        """Name of the backend of calls, or "auto": the one that was chosen, unless that computes no calls."""
        return self.backend

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, lam: Tensor | None, mask: Mask, signal_gate: Tensor | None = None
    ) -> Tensor:
        """Output [B, T, h·dv] of queries [B, query heads, T, d] over keys [B, key heads, S, d] and their values."""
        # Under autocast RoPE and norms return float32 beside the values' bfloat16.
        q, k = q.to(v.dtype), k.to(v.dtype)
        with as_written(v):
            return self._attend(q, k, v, lam, mask, signal_gate).to(v.dtype).transpose(1, 2).flatten(2)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, lam: Tensor | None, mask: Mask, signal_gate: Tensor | None
    ) -> Tensor:
        """Output [B, h, T, dv] of `attend`, in the type that it is computed in."""
        # Only a backend that is chosen by name rounds queries and keys itself.
        named = self.calls_backend in BACKENDS and BACKENDS[self.calls_backend].rounds_operands
        by_backend = named and not self.pv.quantizes and self.calls is None
        if self.qk.quantizes:
            if not by_backend:
                q, k = rounded_operands(q, k, mask, self.qk)
                v = v.to(q.dtype)
            self.qk_calls += 1
        if self.pv.quantizes:
            v = rounded_values(v, mask, self.pv)
            q, k = q.to(v.dtype), k.to(v.dtype)
            self.pv_calls += 1
        call = AttentionCall(
            self.layout.query_maps(q),
            self.layout.key_maps(k),
            v,
            lam,
            scale=self.scale,
            mask=mask,
            logits=self.logits,
            p=self.p,
            qk=self.qk if by_backend else FULL,
            meter=self.meter,
            post=self.post(),
            ranges=self.logit_ranges,
            signal_gate=signal_gate,
        )
        if self.calls is not None:
            self.calls.append(call)
        return backend_for(call, self.calls_backend).compute(call)

    def scalar_lam(self) -> Tensor:
        """λ of a V1 layer, a float32 scalar."""
        vectors = [getattr(self, name) for name in LAMBDA_VECTORS]
        with as_written(vectors[0]):
            return lam_from_vectors(*vectors, init=self.lam_init)

    def post(self) -> PairNorm | None:
        """Norm over a pair's output, with its factor 1 - λ_init, if the model has one.

        Where values are rotated it has no weight: that belongs to channels which `rotated_back` restores first.
        """
        spec = self.spec
        if spec.post_norm == "none":
            return None
        weight = self.subln.weight if spec.post_norm == "affine" and self.value_rotation is None else None
        return PairNorm(spec.post_norm_eps, weight, self.post_factor)

    def rotated_back(self, y: Tensor) -> Tensor:
        """Output [B, T, h·dv] of rotated values as it is of values that are not; the norm's length is the same."""
        if self.value_rotation is None:
            return y
        pairs = rotated(y.unflatten(-1, (self.spec.pairs, -1)), self.value_rotation.mT)
        return (pairs * self.subln.weight if self.spec.post_norm == "affine" else pairs).flatten(-2)


class DiffAttention(PairAttention):
    """Differential attention of a layer, from its Q, K and V projections to its output projection."""

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    lambda_proj: nn.Linear
    output_gate_proj: nn.Linear

    def __init__(self, block: AttentionBlock) -> None:
        super().__init__(block.spec, block.layer)
        add_linears(self, block)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Mask, cache: Cache | None) -> Tensor:
        """Output [B, T, D] for an input x [B, T, D]; `rotary` is cos and sin, [B or 1, T, d]."""
        q, k, v = self.project(x, rotary)
        lam = self.lam(x)
        if self.key_rotation is not None:
            q, k = rotated(q, self.key_rotation), rotated(k, self.key_rotation)
        if self.value_rotation is not None:
            v = rotated(v, self.value_rotation)
        if cache is not None:
            k = without_padding(k, mask)
        y, gate = None, self.signal_gate(x)
        # The decode kernel rounds nothing and has no gate, and a caller may bring its cache to any model.
        is_taken = not self.rounds and gate is None and self.calls is None
        if isinstance(cache, FusedCache) and self.backend == "auto" and is_taken:
            queries, post = self.layout.query_maps(q), self.post()
            fused = cache.attend(self.layer, queries, k, v, lam, scale=self.scale, mask=mask, post=post)
            y = None if fused is None else fused.transpose(1, 2).flatten(2)
        if y is None:
            if cache is not None:
                k, v = cache.update(k, v, self.layer)
            y = self.attend(q, k, v, lam, mask, gate)
        y = self.rotated_back(y)
        if self.spec.output_gate:
            y = y * self.output_gate_proj(x).sigmoid()
        out: Tensor = self.o_proj(y)
        return out

    def project(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, [B, heads, T, width] each, signal heads before noise heads."""
        q = rotate(self.layout.queries(self.q_proj(x)), rotary, self.spec.rope)
        k = rotate(self.layout.keys(self.k_proj(x)), rotary, self.spec.rope)
        return q, k, self.layout.values(self.v_proj(x))

    def lam(self, x: Tensor) -> Tensor | None:
        """λ in float32 for an input x: a scalar (V1), [B, h, T, 1] (V2, V3), None for a plain Transformer."""
        if self.spec.lam == "exp":
            return self.scalar_lam()
        if self.spec.lam == "sigmoid":
            return sigmoids(x, self.lambda_proj)
        if self.spec.lam == "two-gates":
            return sigmoids(x, self.lambda_proj, slice(1, None, 2))
        return None

    def signal_gate(self, x: Tensor) -> Tensor | None:
        """The signal map's factor in float32 for an input x, [B, h, T, 1] (V3), or None if it is 1."""
        return sigmoids(x, self.lambda_proj, slice(0, None, 2)) if self.spec.lam == "two-gates" else None


@contextmanager
def observed(attention: PairAttention) -> Iterator[list[AttentionCall]]:
    """Record the calls that an attention makes inside this context, in order."""
    calls: list[AttentionCall] = []
    attention.calls = calls
    try:
        yield calls
    finally:
        attention.calls = None


def as_written(x: Tensor) -> AbstractContextManager[None]:
    """Context in which products on x's device take their operands' types, also under autocast.

    It would compute λ and the logits that a recipe rounds in bfloat16.
    """
    context: AbstractContextManager[None] = maybe_autocast(x.device.type, enabled=False)
    return context


def sigmoids(x: Tensor, projection: nn.Module, rows: slice = slice(None)) -> Tensor:
    """Sigmoids [B, h, T, 1] in float32 of some rows of a projection of x [B, T, D]."""
    if type(projection) is nn.Linear:
        with as_written(x):
            gates = linear(x.float(), projection.weight[rows].float())
    else:  # An adapter takes the Linear's place, and adds to what its weight gives.
        gates = projection(x)[..., rows].float()
    return gates.sigmoid().transpose(1, 2).unsqueeze(-1)


def without_padding(k: Tensor, mask: Mask) -> Tensor:
    """New keys [B, H, T, d] with zeros where they are padding, which a block's absmax must not see."""
    return k if mask.keys is None else k.masked_fill(~mask.keys[:, None, -k.shape[2] :, None], 0.0)


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor], style: str) -> Tensor:
    """Rotary position embedding of [B, H, T, d]: turns channels i and i + d/2, or 2i and 2i + 1 when interleaved."""
    if style == "none":
        return x
    half = x.shape[-1] // 2
    cos, sin = (table[:, None, :, :half] for table in rotary)
    if style == "half":
        real, imaginary = x[..., :half], x[..., half:]
        return torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin], -1)
    real, imaginary = x[..., 0::2], x[..., 1::2]
    return torch.stack([real * cos - imaginary * sin, imaginary * cos + real * sin], -1).flatten(-2)
