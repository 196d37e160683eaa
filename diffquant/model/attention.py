"""Attention modules for any `DiffSpec`: λ, the maps and the pair norm, with a Transformer's projections.

Parameters keep the row order of their checkpoint; the specification's `layout` describes where each head's rows are.
"""

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from diffquant.attention import BACKENDS, LogitMeter, backend_for
from diffquant.attention.operands import round_operands, round_values
from diffquant.family.call import AttentionCall
from diffquant.family.heads import HeadLayout
from diffquant.family.mask import Mask
from diffquant.family.norm import LAMBDA_VECTORS, PairNorm, lam_from_vectors
from diffquant.family.spec import DiffSpec
from diffquant.model.blocks import AttentionBlock
from diffquant.model.fused_cache import FusedCache
from diffquant.model.linears import add_linears, compute_projection, disable_autocast
from diffquant.recipe import Recipe
from diffquant.recipe.numbers.simulation import make_rotation_matrix, rotate_by
from diffquant.recipe.scheme import FULL


class PairAttention(nn.Module):
    """Attention of a layer except its projections: λ, the maps under a recipe, and the pair norm.

    Shapes: B batch, T queries, S keys, D hidden width, h pairs, h_kv KV pairs, d query and key width, dv value width.

    Attributes:
        layer: 0-based index of the layer.
        scale: factor of Q·Kᵀ.
        backend: name of the attention backend, or "auto".
        logits: scheme of the logits.
        logit_ranges: calibrated ranges if the scheme of the logits is static, else None.
        qk: scheme of the queries and keys in Q·Kᵀ.
        p: scheme of the softmax weights.
        pv: scheme of the values in P·V.
        qk_calls, pv_calls: number of calls whose queries and keys, or values, were quantized.
        meter: counter of quantized logits.
        key_rotation, value_rotation: matrices [d, d] and [dv, dv] that rotate keys and values before they are cached,
            or None.
        lam_init: λ_init of the layer, or 0 if λ does not use it.
        post_factor: factor after the pair norm.
    """

    def __init__(self, spec: DiffSpec, layer: int) -> None:
        super().__init__()
        self.spec = spec
        self.layout: HeadLayout = spec.layout
        self.layer = layer
        self.scale = spec.scale
        # Stored as numbers instead of computed from the layer's index, so that torch.compile shares one graph among
        # all layers.
        self.lam_init = spec.lam_init(layer) if spec.lam == "exp" else 0.0
        self.post_factor = spec.norm_factor(layer)
        self.backend = "auto"
        self.logits = self.qk = self.p = self.pv = FULL
        self.logit_ranges: Tensor | None = None
        self.key_rotation: Tensor | None = None
        self.value_rotation: Tensor | None = None
        self.reset_counts()
        if spec.lam == "exp":
            for name in LAMBDA_VECTORS:
                self.register_parameter(name, nn.Parameter(torch.empty(spec.head_dim)))
        if spec.post_norm == "affine":
            self.subln = LlamaRMSNorm(spec.value_dim, spec.post_norm_eps)

    def apply_recipe(self, recipe: Recipe, widths: tuple[int, int] | None, like: Tensor) -> None:
        """Use a recipe's schemes of logits and operands, and its rotations of keys and values, from now on.

        Args:
            recipe: recipe of the layer.
            widths: widths of the layer's cached keys and values. None means that the layer reads another layer's cache
                and rotates nothing.
            like: tensor with the dtype and device of the rotation matrices.
        """
        self.logits, self.qk, self.p, self.pv = recipe.logits, recipe.qk, recipe.p, recipe.pv
        if widths is not None:
            self.key_rotation, self.value_rotation = (
                make_rotation_matrix(width).to(like) if scheme.has_transform("rotated") else None
                for scheme, width in zip((recipe.k, recipe.v), widths, strict=True)
            )

    def reset_counts(self) -> None:
        """Reset the counters of calls and of quantized logits."""
        self.meter = LogitMeter()
        self.qk_calls = self.pv_calls = 0

    def idle_quantizers(self, recipe: Recipe) -> list[str]:
        """List which of logits, operands and softmax weights a recipe quantizes but no call did since the last reset.

        The result is empty if all of them were quantized.
        """
        counted = {
            "logits": (recipe.logits, self.meter.calls),
            "queries and keys": (recipe.qk, self.qk_calls),
            "softmax weights": (recipe.p, self.meter.p_calls),
            "values before P·V": (recipe.pv, self.pv_calls),
        }
        return [what for what, (scheme, calls) in counted.items() if scheme.quantizes and not calls]

    @property
    def has_quantizers(self) -> bool:
        """Whether logits, queries, keys, softmax weights or values are quantized inside attention."""
        return any(scheme.quantizes for scheme in (self.logits, self.qk, self.p, self.pv))

    @property
    def call_backend(self) -> str:
        """Name of the backend for an `AttentionCall`: `backend`, or "auto" if `backend` only decodes from a cache."""
        return self.backend

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, lam: Tensor | None, mask: Mask, signal_gate: Tensor | None = None
    ) -> Tensor:
        """Compute attention under the recipe.

        Args:
            q: [B, query heads, T, d].
            k: [B, key heads, S, d].
            v: [B, h_kv, S, dv].
            lam, mask, signal_gate: as in `AttentionCall`.

        Returns:
            [B, T, h·dv].
        """
        # Under autocast, RoPE and norms return float32 queries and keys while values are bfloat16.
        q, k = q.to(v.dtype), k.to(v.dtype)
        with disable_autocast(v):
            return self._attend(q, k, v, lam, mask, signal_gate).to(v.dtype).transpose(1, 2).flatten(2)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, lam: Tensor | None, mask: Mask, signal_gate: Tensor | None
    ) -> Tensor:
        """Compute the output of `attend` as [B, h, T, dv], in the dtype of the computation."""
        # Backends that quantize queries and keys themselves are used only if chosen by name.
        named = self.call_backend in BACKENDS and BACKENDS[self.call_backend].rounds_operands
        by_backend = named and not self.pv.quantizes
        if self.qk.quantizes:
            if not by_backend:
                q, k = round_operands(q, k, mask, self.qk)
                v = v.to(q.dtype)
            self.qk_calls += 1
        if self.pv.quantizes:
            v = round_values(v, mask, self.pv)
            q, k = q.to(v.dtype), k.to(v.dtype)
            self.pv_calls += 1
        call = AttentionCall(
            self.layout.split_query_maps(q),
            self.layout.split_key_maps(k),
            v,
            lam,
            scale=self.scale,
            mask=mask,
            logits=self.logits,
            p=self.p,
            qk=self.qk if by_backend else FULL,
            meter=self.meter,
            post=self.pair_norm_settings(),
            ranges=self.logit_ranges,
            signal_gate=signal_gate,
        )
        return backend_for(call, self.call_backend).compute(call)

    def scalar_lam(self) -> Tensor:
        """Compute λ of a V1 layer, a float32 scalar."""
        vectors = [getattr(self, name) for name in LAMBDA_VECTORS]
        with disable_autocast(vectors[0]):
            return lam_from_vectors(*vectors, init=self.lam_init)

    def pair_norm_settings(self) -> PairNorm | None:
        """Return the pair norm with its factor, or None if the model has none.

        If cached values are rotated, the norm is returned without its weight; `undo_rotation` applies it afterwards.
        """
        spec = self.spec
        if spec.post_norm == "none":
            return None
        weight = self.subln.weight if spec.post_norm == "affine" and self.value_rotation is None else None
        return PairNorm(spec.post_norm_eps, weight, self.post_factor)

    def undo_rotation(self, y: Tensor) -> Tensor:
        """Undo the rotation of values in outputs [B, T, h·dv], then apply the pair norm's weight.

        If values are not rotated, return the outputs unchanged.
        """
        if self.value_rotation is None:
            return y
        pairs = rotate_by(y.unflatten(-1, (self.spec.pairs, -1)), self.value_rotation.mT)
        return (pairs * self.subln.weight if self.spec.post_norm == "affine" else pairs).flatten(-2)


class DiffAttention(PairAttention):
    """Differential attention of a layer, including its Q, K, V and output projections.

    Shapes are those of `PairAttention`.
    """

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
        """Compute the output [B, T, D] for an input x [B, T, D]; `rotary` is cos and sin, [B or 1, T, d]."""
        q, k, v = self.project(x, rotary)
        lam = self.compute_lam(x)
        if self.key_rotation is not None:
            q, k = rotate_by(q, self.key_rotation), rotate_by(k, self.key_rotation)
        if self.value_rotation is not None:
            v = rotate_by(v, self.value_rotation)
        if cache is not None:
            k = clear_padded_keys(k, mask)
        y, gate = None, self.compute_signal_gate(x)
        # The decode kernel supports neither quantized maps nor signal gates, and callers may pass such a cache to any
        # model.
        is_taken = not self.has_quantizers and gate is None
        if isinstance(cache, FusedCache) and self.backend == "auto" and is_taken:
            queries, post = self.layout.split_query_maps(q), self.pair_norm_settings()
            fused = cache.attend(self.layer, queries, k, v, lam, scale=self.scale, mask=mask, post=post)
            y = None if fused is None else fused.transpose(1, 2).flatten(2)
        if y is None:
            if cache is not None:
                k, v = cache.update(k, v, self.layer)
            y = self.attend(q, k, v, lam, mask, gate)
        y = self.undo_rotation(y)
        if self.spec.output_gate:
            y = y * self.output_gate_proj(x).sigmoid()
        out: Tensor = self.o_proj(y)
        return out

    def project(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries and keys with rotary embedding, and values, [B, heads, T, width] each, signal heads first."""
        q = apply_rotary_embedding(self.layout.view_queries(self.q_proj(x)), rotary, self.spec.rope)
        k = apply_rotary_embedding(self.layout.view_keys(self.k_proj(x)), rotary, self.spec.rope)
        return q, k, self.layout.view_values(self.v_proj(x))

    def compute_lam(self, x: Tensor) -> Tensor | None:
        """Compute λ in float32 for an input x [B, T, D]: a scalar (V1), [B, h, T, 1] (V2, V3), or None (one map)."""
        if self.spec.lam == "exp":
            return self.scalar_lam()
        if self.spec.lam == "sigmoid":
            return project_sigmoids(x, self.lambda_proj)
        if self.spec.lam == "two-gates":
            return project_sigmoids(x, self.lambda_proj, slice(1, None, 2))
        return None

    def compute_signal_gate(self, x: Tensor) -> Tensor | None:
        """Compute the signal map's factor for an input x [B, T, D]: float32 [B, h, T, 1] (V3), or None if it is 1."""
        return project_sigmoids(x, self.lambda_proj, slice(0, None, 2)) if self.spec.lam == "two-gates" else None


def project_sigmoids(x: Tensor, projection: nn.Module, rows: slice = slice(None)) -> Tensor:
    """Compute the sigmoids of a projection of x [B, T, D], float32 [B, h, T, 1] for h outputs.

    `rows` selects the outputs; by default all of them.
    """
    return compute_projection(x, projection, torch.float32, rows).sigmoid().transpose(1, 2).unsqueeze(-1)


def clear_padded_keys(k: Tensor, mask: Mask) -> Tensor:
    """Set the newest T keys [B, H, T, d] to 0 at padding, so that they do not affect the scale of a block."""
    return k if mask.keys is None else k.masked_fill(~mask.keys[:, None, -k.shape[2] :, None], 0.0)


def apply_rotary_embedding(x: Tensor, rotary: tuple[Tensor, Tensor], style: str) -> Tensor:
    """Apply rotary embedding to x [B, H, T, d].

    Args:
        x: queries or keys.
        rotary: cos and sin, [B or 1, T, d] each.
        style: "half", "interleaved" or "none", as in `DiffSpec.rope`.
    """
    if style == "none":
        return x
    half = x.shape[-1] // 2
    cos, sin = (table[:, None, :, :half] for table in rotary)
    if style == "half":
        real, imaginary = x[..., :half], x[..., half:]
        return torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin], -1)
    real, imaginary = x[..., 0::2], x[..., 1::2]
    return torch.stack([real * cos - imaginary * sin, imaginary * cos + real * sin], -1).flatten(-2)
