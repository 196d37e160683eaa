"""Matched models: a Transformer and the DIFF models that equal it in parameters."""

import torch

from diffquant.errors import UsageError
from diffquant.family.spec import DiffSpec
from diffquant.model.config import DiffTransformerConfig
from diffquant.model.modeling import DiffTransformer
from research.train.settings import Sizes

KINDS = ("transformer", "diff-v1", "diff-v2")
# What V1's wide heads do without a second map: alone, and with V1's norm behind them.
CONTROLS = ("half-heads", "half-heads-norm")
# A Transformer whose heads can say nothing: a sigmoid of the layer's input gates each channel of their output.
GATED = "gated"
# V1's two maps without the norm behind each pair, and without the factor that follows the norm.
NO_NORM = "diff-v1-no-norm"


def matched(kind: str, sizes: Sizes, vocabulary: int) -> DiffTransformerConfig:
    """Configuration of one kind of model.

    V1 has half as many pairs as the Transformer has heads, values twice as wide, and so the same
    projections; λ and the per-pair norm add under 1 %. V2 has as many pairs, which doubles its queries:
    its network is narrowed by what they and λ's projection cost. The controls are Transformers with V1's
    number of heads, twice as wide as the Transformer's, one of them with V1's norm behind each. The gated
    Transformer's network is narrowed by what its gates cost. V1 without its norm has no factor (1 - λ_init) either: the
    factor follows the norm.

    Raises:
        UsageError: the kind is unknown, or one with half the heads is asked for with an odd number of them.

    Source: arXiv 2410.05258, section 2 and appendix D; microsoft/unilm, Diff-Transformer-V2; the gate is that of arXiv
    2505.06708, elementwise behind attention.
    """
    known = (*KINDS, *CONTROLS, GATED, NO_NORM)
    if kind not in known:
        raise UsageError(f"unknown kind {kind!r}; known are {', '.join(known)}")
    if kind in ("diff-v1", *CONTROLS, NO_NORM) and sizes.heads % 2:
        raise UsageError(f"{kind} halves the Transformer's heads and needs an even number, got {sizes.heads}")
    inner = sizes.inner - _width_of(_extra_rows(kind, sizes))
    spec = _spec(kind, sizes.heads, sizes.head_dim)
    return DiffTransformerConfig(
        vocab_size=vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=inner,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        head_dim=spec.head_dim,
        max_position_embeddings=sizes.context,
        initializer_range=sizes.init,
        attention_bias=sizes.bias,
        rope_parameters={"rope_type": "default", "rope_theta": float(sizes.theta)},
        tie_word_embeddings=True,
        spec=spec.to_dict(),
    )


@torch.no_grad()
def look_back(model: DiffTransformer, sharpness: float = 4.5) -> None:
    """Let the first layer's first two signal maps start out reading one and two tokens back, whatever stands there.

    Retrieval takes two steps: a number learns which city stands before it, and a question finds it by that
    city. Gradients teach the second once the first is there; neither alone helps, and small models wait long
    for both. Rotary embedding turns a query and a key of constant biases into a function of their distance alone.

    Args:
        model: model whose attention's projections have biases.
        sharpness: magnitude of the biases.
    """
    attention = model.attention_modules[0]
    spec = attention.spec
    frequencies = model.model.rotary_emb.inv_freq[: spec.head_dim // 4]
    for pair, distance in enumerate((1, 2)):
        query, key = (spec.layout.channel_rows(projection)[pair] for projection in ("q_proj", "k_proj"))
        rotated = [torch.cos(distance * frequencies), torch.sin(distance * frequencies)]
        for projection, rows, parts in (
            (attention.q_proj, query, [torch.ones_like(frequencies), torch.zeros_like(frequencies)]),
            (attention.k_proj, key, rotated),
        ):
            rest = torch.zeros(spec.head_dim // 2 - len(frequencies))
            projection.weight[rows] = 0
            projection.bias[rows] = sharpness * torch.cat([parts[0], rest, parts[1], rest])


def place(model: DiffTransformer, device: str, dtype: torch.dtype) -> DiffTransformer:
    """Move a model, its parameters in `dtype`; rotary frequencies stay float32, as a checkpoint's reader has them."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.to(device)


def _spec(kind: str, heads: int, width: int) -> DiffSpec:
    if kind == "transformer":
        return DiffSpec(heads, heads, width, width, maps=1)
    if kind == "diff-v1":
        return DiffSpec(heads // 2, heads // 2, width, 2 * width, lam="exp", post_norm="affine", scale_by_init=True)
    if kind == NO_NORM:
        return DiffSpec(heads // 2, heads // 2, width, 2 * width, lam="exp")
    if kind == GATED:
        return DiffSpec(heads, heads, width, width, maps=1, output_gate=True)
    if kind == "half-heads":
        return DiffSpec(heads // 2, heads // 2, 2 * width, 2 * width, maps=1)
    if kind == "half-heads-norm":
        return DiffSpec(heads // 2, heads // 2, 2 * width, 2 * width, maps=1, post_norm="affine", scale_by_init=True)
    return DiffSpec(heads, heads, width, width, shared_k=True, lam="sigmoid")


def _extra_rows(kind: str, sizes: Sizes) -> int:
    """Rows that a kind's attention has more than the Transformer's: V2's second queries and λ, or gates."""
    return {"diff-v2": sizes.heads * (sizes.head_dim + 1), GATED: sizes.heads * sizes.head_dim}.get(kind, 0)


def _width_of(rows: int) -> int:
    """Number of channels of the SwiGLU network, three matrices wide, that weigh as much as some rows."""
    return round(rows / 3)
