"""The MLP after a layer's attention."""

import torch
from torch import Tensor, nn

from diffquant.model.activations import Activation, activation_named
from diffquant.model.blocks import MLPBlock
from diffquant.model.linears import add_linears
from diffquant.model.quantized_linear import QuantizedLinear


class DiffMLP(nn.Module):
    """A gated network without state: down(act(gate(x)) · up(x)).

    Attributes:
        gate_up_proj: layer that takes the place of `gate_proj` and `up_proj` where they are packed alike.
    """

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    gate_up_proj: nn.Module | None

    def __init__(self, block: MLPBlock) -> None:
        super().__init__()
        add_linears(self, block)
        self.act_fn = _ActivationModule(activation_named(block.activation))
        self.gate_up_proj = None

    def join_gate_and_up(self) -> None:
        """Merge gate and up into one packed layer if their schemes are equal, to launch one product instead of two."""
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
