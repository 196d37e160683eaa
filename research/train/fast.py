"""A training step for one core: float32 parameters and residual, bfloat16 products, fused kernels.

It computes what `DiffTransformer` and cross entropy do, in another arithmetic; `kernels.cc` has the kernels.
"""

from ctypes import addressof
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional
from torch.nn.functional import embedding

from diffquant.errors import UsageError
from diffquant.model.modeling import DiffTransformer
from research.train.equalized import normed
from research.train.kernels import Layout, call, has_products, library, longs

BF16 = torch.bfloat16
# Rows of logits that exist at once.
_ROWS = 2048
_TILE = 64


class FastLoss:
    """Loss of a model whose parameters are float32, differentiable.

    Raises:
        UsageError: the processor, or the model's shape, is one that the kernels do not take.
    """

    def __init__(self, model: DiffTransformer) -> None:
        library()
        _check(model)
        self._model = model
        self._heads = _Heads(model)
        self._rotary: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, ids: Tensor, weights: Tensor) -> Tensor:
        """Weighted cross entropy, a scalar, of ids [rows, length + 1] under weights [rows, length]."""
        model = self._model.model
        read, targets = ids[:, :-1], ids[:, 1:].flatten()
        rotary = self._tables(read.shape[1])
        x, added = embedding(read, model.embed_tokens.weight), None
        for layer in model.layers:
            norm = layer.input_layernorm
            x, y = _AddNorm.apply(x, added, norm.weight, norm.variance_epsilon)
            added = self._attention(layer.self_attn, y, rotary)
            norm = layer.post_attention_layernorm
            x, y = _AddNorm.apply(x, added, norm.weight, norm.variance_epsilon)
            mlp = layer.mlp
            gate_up = _linear(y, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
            added = _linear(_SwiGLU.apply(gate_up), mlp.down_proj.weight)
        _, y = _AddNorm.apply(x, added, model.norm.weight, model.norm.variance_epsilon)
        return _CrossEntropy.apply(y.flatten(0, 1), self._model.lm_head.weight, targets, weights.flatten().float())

    def _attention(self, attention: Any, y: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Output [B, T, D] of an attention whose input is y [B, T, D], both bfloat16."""
        spec, signals = attention.spec, attention.spec.pairs
        weights = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        projections = _linear(y, torch.cat(weights))
        if gain := getattr(attention.q_proj, "gain", None):
            qk, v = projections.split([len(weights[0]) + len(weights[1]), len(weights[2])], -1)
            projections = torch.cat([normed(qk, spec.head_dim, gain), v], -1)
        out = _Attention.apply(projections, *rotary, self._heads)
        if spec.lam == "exp":
            signal, noise = out.float().split(signals, 2)
            out = torch.addcmul(signal, attention.scalar_lam(), noise, value=-1)
        elif spec.lam == "sigmoid":
            lam = functional.linear(y.float(), attention.lambda_proj.weight).sigmoid().to(BF16).unsqueeze(-1)
            out = torch.addcmul(out[:, :, :signals], lam, out[:, :, signals:], value=-1)
        if spec.post_norm == "affine":
            weight = attention.subln.weight * attention.post_factor
            _, out = _AddNorm.apply(out.float(), None, weight, spec.post_norm_eps)
        out = out.to(BF16).flatten(2)
        if spec.output_gate:
            out = out * _linear(y, attention.output_gate_proj.weight).sigmoid()
        return _linear(out, attention.o_proj.weight)

    def _tables(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [length, d / 2] of the rotary embedding."""
        if length not in self._rotary:
            tables = self._model.model.rotary_emb(torch.empty(0), position_ids=torch.arange(length)[None])
            half = self._heads.width // 2
            cosine, sine = (table[0, :, :half].contiguous() for table in tables)
            self._rotary[length] = cosine, sine
        return self._rotary[length]


class _Heads:
    """Where each head stands among the projections' channels: queries, then keys, then values."""

    def __init__(self, model: DiffTransformer) -> None:
        layout = model.attention_modules[0].spec.layout
        self.width, self.value_width = layout.head_dim, layout.value_dim
        self.scale = model.attention_modules[0].spec.scale
        starts, behind = [], 0
        for projection in ("q_proj", "k_proj", "v_proj"):
            rows = layout.channel_rows(projection)
            if not torch.equal(rows, rows[:, :1] + torch.arange(rows.shape[1])):
                raise UsageError("bf16 training needs the channels of a head to stand together")
            starts.append(longs([behind + int(row) for row in rows[:, 0]]))
            behind += layout.row_count(projection)
        self.queries, self.keys, self.values = starts
        pair_of = [pair * layout.kv_pairs // layout.pairs for pair in range(layout.pairs)] * layout.maps
        behind_signals = 0 if layout.shares_keys else layout.kv_pairs
        key_of = [pair + behind_signals * (head >= layout.pairs) for head, pair in enumerate(pair_of)]
        self.key_of, self.value_of = longs(key_of), longs(pair_of)

    def layout(self, projections: Tensor) -> Layout:
        """Layout of projections [B, T, channels] for the kernels."""
        heads = (self.queries, self.keys, self.values)
        pointers = [addressof(array) for array in (*heads, self.key_of, self.value_of)]
        return Layout(*projections.shape, *map(len, heads), self.width, self.value_width, self.scale, *pointers)


class _Attention(Function):
    """Rotary embedding and causal attention of every map: [B, T, heads, dv], from projections [B, T, channels]."""

    @staticmethod
    def forward(ctx: Any, projections: Tensor, cosine: Tensor, sine: Tensor, heads: _Heads) -> Tensor:
        layout = heads.layout(projections)
        batch, length = projections.shape[:2]
        count = len(heads.queries)
        out = projections.new_empty(batch, length, count, heads.value_width)
        log_sums = cosine.new_empty(batch, count, -(-length // _TILE) * _TILE)
        call("attention_forward", layout, projections, cosine, sine, out, log_sums)
        ctx.save_for_backward(out, log_sums, projections, cosine, sine)
        ctx.heads = heads
        return out

    @staticmethod
    def backward(ctx: Any, upper: Tensor) -> tuple[Tensor, None, None, None]:
        out, log_sums, projections, cosine, sine = ctx.saved_tensors
        gradient, layout = torch.empty_like(projections), ctx.heads.layout(projections)
        rest = (out, log_sums, projections, cosine, sine, gradient)
        call("attention_backward", layout, upper.contiguous(), *rest)
        return gradient, None, None, None


class _AddNorm(Function):
    """A sum in float32, of x and of an addend in bfloat16 or None, and its RMSNorm in bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        total = x.view_as(x) if added is None else torch.empty_like(x)
        out, inverse = torch.empty_like(x, dtype=BF16), x.new_empty(x.numel() // x.shape[-1])
        addend = None if added is None else added.contiguous()
        call("norm_forward", *_rows(x), epsilon, x, addend, weight, total, out, inverse)
        ctx.save_for_backward(total, weight, inverse)
        ctx.adds = added is not None
        return total, out

    @staticmethod
    def backward(ctx: Any, sum_upper: Tensor | None, upper: Tensor) -> tuple[Tensor, Tensor | None, Tensor, None]:
        total, weight, inverse = ctx.saved_tensors
        gradient, weight_gradient = torch.empty_like(total), torch.zeros_like(weight)
        narrow = torch.empty_like(total, dtype=BF16) if ctx.adds else None
        uppers = (None if sum_upper is None else sum_upper.contiguous(), upper.contiguous())
        made = (gradient, narrow, weight_gradient)
        call("norm_backward", *_rows(total), *uppers, total, weight, inverse, *made)
        return gradient, narrow, weight_gradient, None


class _SwiGLU(Function):
    """silu(gate) · up [.., inner] of both [.., 2 inner], gate first."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        inner = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], inner)
        call("swiglu_forward", gate_up.numel() // (2 * inner), inner, gate_up, out)
        return out

    @staticmethod
    def backward(ctx: Any, upper: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gradient, inner = torch.empty_like(gate_up), gate_up.shape[-1] // 2
        call("swiglu_backward", gate_up.numel() // (2 * inner), inner, upper.contiguous(), gate_up, gradient)
        return gradient


class _CrossEntropy(Function):
    """Weighted cross entropy of x @ weight.T, some rows of logits at a time, which their gradient replaces."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        narrow, loss = weight.to(BF16), 0.0
        gradient, weight_gradient = torch.empty_like(x), torch.zeros_like(weight)
        for rows in torch.arange(len(x)).split(_ROWS):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            logits = _product(x[part], narrow.mT)
            loss += call("cross_entropy", *logits.shape, logits, targets[part].contiguous(), weights[part])
            gradient[part] = _product(logits, narrow)
            weight_gradient += _product(logits.mT, x[part])
        ctx.save_for_backward(gradient, weight_gradient)
        return torch.tensor(loss)

    @staticmethod
    def backward(ctx: Any, upper: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gradient, weight_gradient = ctx.saved_tensors
        return gradient * upper.to(BF16), weight_gradient * upper, None, None


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in bfloat16, of x in bfloat16 and a weight in float32."""
    narrow = weight.to(BF16)
    if has_products():
        return functional.linear(x, narrow)
    return functional.linear(x.float(), narrow.float()).to(BF16)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, all in bfloat16."""
    return a @ b if has_products() else (a.float() @ b.float()).to(BF16)


def _rows(x: Tensor) -> tuple[int, int]:
    return x.numel() // x.shape[-1], x.shape[-1]


def _check(model: DiffTransformer) -> None:
    config, spec = model.config, model.attention_modules[0].spec
    faults = {
        "attention with biases": config.attention_bias or config.mlp_bias,
        f"the activation {config.hidden_act}": config.hidden_act not in ("silu", "swish"),
        f"parameters in {model.dtype}": model.dtype != torch.float32,
        f"a vocabulary of {config.vocab_size}, which 16 does not divide": config.vocab_size % 16,
        f"a hidden size of {config.hidden_size}, which 16 does not divide": config.hidden_size % 16,
        f"heads {spec.head_dim} and {spec.value_dim} wide, which 32 does not divide": spec.head_dim % 32
        or spec.value_dim % 32,
        f"rotary embedding of style {spec.rope}": spec.rope != "half",
        "two gates, grouped maps or a norm without a weight": spec.lam == "two-gates"
        or spec.signals_per_noise > 1
        or spec.post_norm == "plain",
    }
    if wrong := [fault for fault, is_there in faults.items() if is_there]:
        raise UsageError(f"bf16 training does not compute {', '.join(wrong)}; train in float32 instead")
