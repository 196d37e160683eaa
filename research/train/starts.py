"""Starts of DIFF models: they compute nearly what a Transformer computes, on its weights.

A DIFF head takes over a Transformer's head as both of its maps. Heads are not joined two by two: the maps of
two heads weigh values apart, which one pair's values cannot, and nine heads do not pair.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from diffquant.family.norm import LAMBDA_VECTORS
from diffquant.family.spec import DiffSpec
from diffquant.model.config import DiffTransformerConfig
from diffquant.model.modeling import DiffTransformer

# Standard deviation of V1's λ vectors (arXiv 2410.05258, section 2.1).
_LAMBDA_STD = 0.1
# λ of both at the start; V2 has it where its projection is 0.
_LAMBDA = 0.5
# V1's constant channels, in root mean squares of the values beside them.
_CONSTANT = 3.0

# A layer's attention by name within it, such as "q_proj.weight".
Attention = dict[str, Tensor]


@dataclass(frozen=True)
class Level:
    """Level of a layer's values and output, by which V1's norm is set.

    Attributes:
        constant: constant [h_kv] that the second half of each KV pair's values starts as.
        gain: factor [h] by which the norm shrinks each pair's output, to be multiplied back.
    """

    constant: Tensor
    gain: Tensor


def spec_of(kind: str, base: DiffSpec) -> DiffSpec:
    """Spec of a kind's attention on a Transformer's: a pair for every head, a KV pair for every KV head."""
    heads, kv_heads, width = base.pairs, base.kv_pairs, base.head_dim
    if kind == "diff-v1":
        return DiffSpec(heads, kv_heads, width, 2 * width, lam="exp", post_norm="affine", scale_by_init=True)
    if kind == "diff-v2":
        return DiffSpec(heads, kv_heads, width, width, shared_k=True, lam="sigmoid")
    return base


def config_of(kind: str, base: DiffTransformerConfig) -> DiffTransformerConfig:
    """Config of a kind's model; V1 has biases, since a bias is what makes a value constant."""
    settings = base.to_dict() | {"spec": spec_of(kind, base.diff_spec).to_dict()}
    if kind == "diff-v1":
        settings["attention_bias"] = True
    return DiffTransformerConfig(**settings)


def new_model(
    kind: str, base: DiffTransformer, levels: list[Level], perturbation: float = 0.0, seed: int = 0
) -> DiffTransformer:
    """Model of a kind on a Transformer's weights, in float32.

    Args:
        kind: "transformer" (a copy), "diff-v1" or "diff-v2".
        base: Transformer, in float32.
        levels: level of each of its layers, for V1.
        perturbation: size of the noise on the second maps' queries, in standard deviations of the query weights.
        seed: seed of the noise and of V1's λ vectors.
    """
    model = DiffTransformer(config_of(kind, base.config))
    state = {name: tensor for name, tensor in base.state_dict().items() if ".self_attn." not in name}
    draw = torch.Generator().manual_seed(seed)
    heads, width = base.config.diff_spec.pairs, base.config.diff_spec.head_dim
    for layer, attention in enumerate(attention_of(base)):
        level = levels[layer] if kind == "diff-v1" else None
        tensors = take_over(kind, attention, base.config.diff_spec, level)
        if kind == "diff-v1":
            tensors |= _lambda_of_half(model.config.diff_spec.lam_init(layer), width, draw)
        if kind != "transformer":
            _perturb(tensors["q_proj.weight"], heads, perturbation, draw)
        state |= {f"model.layers.{layer}.self_attn.{name}": tensor for name, tensor in tensors.items()}
    model.load_state_dict(state)
    return model.eval().requires_grad_(False)


def attention_parameters(model: DiffTransformer) -> dict[str, nn.Parameter]:
    """Parameters of every layer's attention, by full name."""
    return {name: parameter for name, parameter in model.named_parameters() if ".self_attn." in name}


def attention_of(model: DiffTransformer) -> list[Attention]:
    """Attention of each layer, by name within it."""
    return [dict(attention.state_dict()) for attention in model.attention_modules]


def take_over(kind: str, attention: Mapping[str, Tensor], spec: DiffSpec, level: Level | None) -> Attention:
    """Attention of a layer of this kind, noise and V1's λ vectors apart: the same numbers wherever it is computed.

    Every query head stands twice, and λ is ½ everywhere, so V2's output is doubled. V1's keys stand twice too.
    Its values are twice as wide, and their second half is constant: that keeps the per-pair norm from taking the
    size of a head's output away, since what the norm divides by is nearly the constant alone. The norm's weight
    hides the constant; what the output projection would make of it is the next head's, for training to find.

    Args:
        attention: tensors of the Transformer's attention, by name within the layer.
        spec: spec of the Transformer's attention.
        level: level of the layer, for V1.
    """
    if kind == "transformer":
        return dict(attention)
    heads, kv_heads = spec.pairs, spec.kv_pairs
    new = dict(attention)
    for name in attention:
        if name.startswith("q_proj"):
            new[name] = _doubled(attention[name], heads)
    weight = attention["o_proj.weight"]
    if kind == "diff-v2":
        return new | {"o_proj.weight": 2 * weight, "lambda_proj.weight": weight.new_zeros(heads, weight.shape[0])}
    biases = {f"{p}_proj.bias": weight.new_zeros(len(new[f"{p}_proj.weight"])) for p in "qkvo"}
    new = biases | new
    for part in ("weight", "bias"):
        new[f"k_proj.{part}"] = _doubled(new[f"k_proj.{part}"], kv_heads)
        values = new[f"v_proj.{part}"].unflatten(0, (kv_heads, spec.head_dim))
        new[f"v_proj.{part}"] = torch.cat([values, torch.zeros_like(values)], 1).flatten(0, 1)
    new["v_proj.bias"].view(kv_heads, 2, -1)[:, 1] = level.constant[:, None]
    # Shown to the output projection, the constant would be a bias with the learning rate of hundreds of weights.
    common = level.gain.mean()
    columns = weight.unflatten(1, (heads, spec.head_dim))
    new["o_proj.weight"] = torch.cat([columns * (level.gain / common)[:, None], columns.roll(1, 1)], 2).flatten(1)
    norm = torch.cat([common.expand(spec.head_dim), torch.zeros(spec.head_dim)])
    return new | {"subln.weight": norm}


@torch.no_grad()
def levels_of(base: DiffTransformer, ids: Tensor) -> list[Level]:
    """Level of every layer for V1, from a text.

    Args:
        base: Transformer, in float32 on the CPU.
        ids: token ids [B, T].
    """
    plain = base.config.diff_spec
    values: list[Tensor] = []
    outputs: list[Tensor] = []
    hooks = []
    for attention in base.attention_modules:
        hooks.append(
            attention.v_proj.register_forward_hook(lambda _m, _x, y: values.append(_mean_squares(y, plain.kv_pairs)))
        )
        hooks.append(
            attention.o_proj.register_forward_pre_hook(lambda _m, x: outputs.append(_mean_squares(x[0], plain.pairs)))
        )
    try:
        base.model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    spec = spec_of("diff-v1", plain)
    return [_level(*squares, spec, layer) for layer, squares in enumerate(zip(values, outputs, strict=True))]


def _mean_squares(x: Tensor, heads: int) -> Tensor:
    """Mean square of each head of x [B, T, heads·d]."""
    return x.unflatten(-1, (heads, -1)).square().mean((0, 1, 3))


def _level(values: Tensor, output: Tensor, spec: DiffSpec, layer: int) -> Level:
    """Level of a layer, of the mean squares of its values, a KV head, and of its attention's output, a head."""
    constant = _CONSTANT * values.sqrt()
    halves = constant.square().repeat_interleave(spec.pairs // spec.kv_pairs) + output
    normed_by = ((1 - _LAMBDA) ** 2 * halves / 2 + spec.post_norm_eps).sqrt()
    return Level(constant, normed_by / (1 - _LAMBDA) / (1 - spec.lam_init(layer)))


def _doubled(x: Tensor, heads: int) -> Tensor:
    """Matrix or bias with every head's rows twice, side by side."""
    return x.unflatten(0, (heads, -1)).repeat_interleave(2, 0).flatten(0, 1)


def _perturb(queries: Tensor, heads: int, share: float, draw: torch.Generator) -> None:
    second = queries.unflatten(0, (heads, 2, -1))[:, 1]
    second += share * queries.std() * torch.randn(second.shape, generator=draw)


def _lambda_of_half(lam_init: float, width: int, draw: torch.Generator) -> Attention:
    """Random vectors of which λ is ½: equal maps under V1's own λ_init, up to 0.8, would nearly cancel."""
    exponent = math.asinh((_LAMBDA - lam_init) / 2)
    vectors = []
    for product in (exponent, -exponent):
        q, k = (_LAMBDA_STD * torch.randn(width, generator=draw) for _ in range(2))
        vectors += [q, k + (product - q @ k) * q / (q @ q)]
    return dict(zip(LAMBDA_VECTORS, vectors, strict=True))
