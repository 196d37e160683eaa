"""The network behind a layer's attention, and the activations that it may have."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, silu

from diffquant.errors import CheckpointError
from diffquant.model.quantized_linear import QuantizedLinear

if TYPE_CHECKING:
    from diffquant.model.config import DiffTransformerConfig

POLY_NORM_EPS = 1e-6


@dataclass(frozen=True)
class Activation:
    """What an MLP does to its gate, as `hidden_act` of a config.json names it.

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


class DiffMLP(nn.Module):
    """A gated network without state: down(act(gate(x)) · up(x)).

    Attributes:
        gate_up_proj: layer that takes the place of `gate_proj` and `up_proj` where they are packed alike.
    """

    gate_proj: nn.Module
    up_proj: nn.Module
    gate_up_proj: nn.Module | None

    def __init__(self, config: "DiffTransformerConfig") -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.act_fn = _ActivationModule(activation_named(config.hidden_act))
        self.gate_up_proj = None

    def join_gate_and_up(self) -> None:
        """Make one packed layer of gate and up where they are packed alike: a product is one launch instead of two."""
        gate, up = self.gate_proj, self.up_proj
        if isinstance(gate, QuantizedLinear) and isinstance(up, QuantizedLinear):
            self.gate_up_proj = gate.with_rows_of(up)
        if self.gate_up_proj is not None:
            del self.gate_proj, self.up_proj

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_up_proj is None:
            gate, up = self.gate_proj(x), self.up_proj(x)
        else:
            gate, up = self.gate_up_proj(x).chunk(2, -1)
        out: Tensor = self.down_proj(self.act_fn(gate) * up)
        return out


class _ActivationModule(nn.Module):
    """An activation with its parameters."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.compute = activation.compute
        for name, values in activation.parameters.items():
            self.register_parameter(name, nn.Parameter(torch.tensor(values)))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, **dict(self.named_parameters()))
