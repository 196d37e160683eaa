"""Activation functions of gated MLPs, by their `hidden_act` names in config.json."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from diffquant.errors import CheckpointError

POLY_NORM_EPS = 1e-6


def poly_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute w0·n(x³) + w1·n(x²) + w2·n(x) + b, where n(z) = z / √(mean(z²) + 1e-6).

    Args:
        x: [..., n]; means are over the last axis.
        weight: [w0, w1, w2].
        bias: [1].

    Returns:
        [..., n] in x's dtype, computed in at least float32.

    Source: PolyNorm, arXiv 2411.03884; the Motif models' modelling code.
    """
    # In float16, x³ overflows at |x| > 40, and its square at |x| > 6.4.
    wide, weights, offset = (z if z.dtype == torch.float64 else z.float() for z in (x, weight, bias))
    square = wide * wide
    cubic = _rms_normalize(square * wide) * weights[0]
    return (cubic + _rms_normalize(square) * weights[1] + _rms_normalize(wide) * weights[2] + offset).to(x.dtype)


def _rms_normalize(z: Tensor) -> Tensor:
    return z * torch.rsqrt(z.square().mean(-1, keepdim=True) + POLY_NORM_EPS)


def _gelu_tanh(x: Tensor) -> Tensor:
    return gelu(x, approximate="tanh")


# Functions of the gate [..., n] and the activation's parameters by name that return the activated gate [..., n].
ACTIVATIONS: Mapping[str, Callable[..., Tensor]] = {
    "silu": silu,
    "swish": silu,
    "gelu": gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": relu,
    "poly_norm": poly_norm,
}
# Initial values of an activation's parameters, by their names within `act_fn`.
PARAMETERS: Mapping[str, Mapping[str, Sequence[float]]] = {"poly_norm": {"weight": (1 / 3,) * 3, "bias": (0.0,)}}


def find_activation(name: str) -> Callable[..., Tensor]:
    """Return the activation function for a `hidden_act` of config.json.

    Raises:
        CheckpointError: no activation has that name.
    """
    if name not in ACTIVATIONS:
        raise CheckpointError(
            f"config.json: hidden_act is {name!r}, which is not supported; choose from {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]
