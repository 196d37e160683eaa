"""The activations that a gated network may have, as `hidden_act` of a config.json names them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from diffquant.errors import CheckpointError

POLY_NORM_EPS = 1e-6


@dataclass(frozen=True)
class Activation:
    """The activation of an MLP's gate, under the name that `hidden_act` of a config.json has for it.

    Attributes:
        compute: function from the gate [..., n], and the activation's parameters by name, to the active gate [..., n].
        parameters: values that the parameters of its own start with, by the name they have below `act_fn`.
    """

    compute: Callable[..., Tensor]
    parameters: Mapping[str, Sequence[float]] = field(default_factory=dict)


def poly_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The polynomial w0·n(x³) + w1·n(x²) + w2·n(x) + b, where n(z) = z / √(mean(z²) + 1e-6).

    Args:
        x: [..., n]; means run over the last axis.
        weight: [3], that of the cube first.
        bias: [1].

    Returns:
        [..., n] in x's dtype, computed in float32 at least.

    Source: PolyNorm, arXiv 2411.03884; the Motif models' modelling code.
    """
    # In float16 a cube overflows from |x| = 40 on, and its square from 6.4 on.
    wide, weights, offset = (z if z.dtype == torch.float64 else z.float() for z in (x, weight, bias))
    square = wide * wide
    cubic = _normed(square * wide) * weights[0]
    return (cubic + _normed(square) * weights[1] + _normed(wide) * weights[2] + offset).to(x.dtype)


def _normed(z: Tensor) -> Tensor:
    return z * torch.rsqrt(z.square().mean(-1, keepdim=True) + POLY_NORM_EPS)


def _gelu_tanh(x: Tensor) -> Tensor:
    return gelu(x, approximate="tanh")


ACTIVATIONS: Mapping[str, Activation] = {
    "silu": Activation(silu),
    "swish": Activation(silu),
    "gelu": Activation(gelu),
    "gelu_new": Activation(_gelu_tanh),
    "gelu_pytorch_tanh": Activation(_gelu_tanh),
    "relu": Activation(relu),
    "poly_norm": Activation(poly_norm, {"weight": (1 / 3,) * 3, "bias": (0.0,)}),
}


def activation_named(name: str) -> Activation:
    """The activation that a config.json calls `hidden_act`.

    Raises:
        CheckpointError: none has that name.
    """
    if name not in ACTIVATIONS:
        raise CheckpointError(
            f"config.json: hidden_act is {name!r}, which is not computed; known are {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]
