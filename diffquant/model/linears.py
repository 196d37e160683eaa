"""Linear layers, 16-bit or packed, projections in a wider dtype, and the gated MLP made of them."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from transformers.utils.generic import maybe_autocast

from diffquant.kernels.linear.linear import linear
from diffquant.kernels.linear.repack import PackedWeight, join_refusal, join_rows
from diffquant.model.activations import PARAMETERS, find_activation
from diffquant.model.blocks import Block, MLPBlock


def add_linears(module: nn.Module, block: Block) -> None:
    """Add to a module an `nn.Linear` for each weight of its block that can be quantized, in the block's order."""
    parameters = block.parameter_specs()
    for name, parameter in parameters.items():
        child = name.removesuffix(".weight")
        if child != name and len(parameter.shape) == 2 and parameter.packing != "never":
            out, width = parameter.shape
            module.add_module(child, nn.Linear(width, out, bias=f"{child}.bias" in parameters))


def compute_projection(x: Tensor, projection: nn.Module, dtype: torch.dtype, rows: slice = slice(None)) -> Tensor:
    """Compute a projection of x [..., D] in a dtype and without its bias; `rows` selects the outputs.

    A module in the place of a Linear, such as a LoRA adapter, adds to the product with its weight, in its own dtype. So
    does a Linear that accelerate has offloaded: only a call loads its weight.
    """
    if type(projection) is nn.Linear and not projection.weight.is_meta:
        with disable_autocast(x):
            return nn.functional.linear(x.to(dtype), projection.weight[rows].to(dtype))
    weight, bias = getattr(projection, "weight", x), getattr(projection, "bias", None)
    out: Tensor = projection(x.to(weight.dtype))[..., rows].to(dtype)
    return out if bias is None else out - bias[rows].to(dtype)


def disable_autocast(x: Tensor) -> AbstractContextManager[None]:
    """Return a context that disables autocast on x's device.

    Autocast would compute λ and quantized logits in bfloat16.
    """
    context: AbstractContextManager[None] = maybe_autocast(x.device.type, enabled=False)
    return context


class QuantizedLinear(nn.Module):
    """Linear layer x [..., K] -> x · Wᵀ + bias [..., N] with a packed weight, stored in buffers.

    Its `state_dict` has the kernels' layout and loads only into a model with the same schemes. Checkpoints have the
    layout of `numbers.pack`.

    Attributes:
        low, high, scales, row_scale: as in `PackedWeight`.
    """

    low: Tensor
    high: Tensor | None
    scales: Tensor | None
    row_scale: Tensor
    bias: nn.Parameter | None

    def __init__(self, weight: PackedWeight, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.bits, self.group = weight.bits, weight.group
        self.out_features, self.in_features = weight.shape
        for name in ("low", "high", "scales", "row_scale"):
            self.register_buffer(name, getattr(weight, name))
        self.register_parameter("bias", bias)

    @property
    def packed(self) -> PackedWeight:
        shape = self.out_features, self.in_features
        return PackedWeight(self.low, self.high, self.scales, self.row_scale, self.bits, self.group, shape)

    def join_outputs(self, other: QuantizedLinear) -> QuantizedLinear | None:
        """Return one layer that computes this layer's outputs followed by those of another layer on the same input.

        None means that their weights cannot be joined, or that only one has a bias.
        """
        if join_refusal(self.packed, other.packed) or (self.bias is None) != (other.bias is None):
            return None
        joined = QuantizedLinear(join_rows(self.packed, other.packed))
        if self.bias is not None and other.bias is not None:
            joined.bias = nn.Parameter(torch.cat([self.bias, other.bias]), requires_grad=False)
        return joined

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.packed, self.bias)


class DiffMLP(nn.Module):
    """A gated MLP: down(act(gate(x)) · up(x)).

    Attributes:
        gate_up_proj: layer that replaces `gate_proj` and `up_proj` if they are packed with equal schemes.
    """

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    gate_up_proj: nn.Module | None

    def __init__(self, block: MLPBlock) -> None:
        super().__init__()
        add_linears(self, block)
        self.act_fn = _Activation(block.activation)
        self.gate_up_proj = None

    def join_gate_and_up(self) -> None:
        """Join gate and up into one packed layer if their schemes are equal, so that one kernel computes both."""
        gate, up = self.gate_proj, self.up_proj
        if isinstance(gate, QuantizedLinear) and isinstance(up, QuantizedLinear):
            self.gate_up_proj = gate.join_outputs(up)
        if self.gate_up_proj is not None:
            del self.gate_proj, self.up_proj

    def forward(self, x: Tensor) -> Tensor:
        if self.gate_up_proj is None:
            gate, up = self.gate_proj(x), self.up_proj(x)
        else:
            gate, up = self.gate_up_proj(x).chunk(2, -1)
        out: Tensor = self.down_proj(self.act_fn(gate) * up)
        return out


class _Activation(nn.Module):
    """An activation function with its parameters."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.compute = find_activation(activation)
        for name, values in PARAMETERS.get(activation, {}).items():
            self.register_parameter(name, nn.Parameter(torch.tensor(values)))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, **dict(self.named_parameters()))
