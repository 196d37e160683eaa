"""A Linear whose weight stays packed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from diffquant.kernels.linear.linear import linear
from diffquant.kernels.linear.repack import PackedWeight, join, join_refusal


class QuantizedLinear(nn.Module):
    """Linear layer x [..., K] -> x · Wᵀ + bias [..., N] on a packed weight, whose parts are buffers.

    Its `state_dict` holds the kernels' layout, for a model that is packed alike; checkpoints hold `numbers.pack`'s.
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

    def with_rows_of(self, other: QuantizedLinear) -> QuantizedLinear | None:
        """One layer x [..., K] -> [..., N1 + N2] for this layer's product and another's, or None if none can be."""
        if join_refusal(self.packed, other.packed) or (self.bias is None) != (other.bias is None):
            return None
        joined = QuantizedLinear(join(self.packed, other.packed))
        if self.bias is not None and other.bias is not None:
            joined.bias = nn.Parameter(torch.cat([self.bias, other.bias]), requires_grad=False)
        return joined

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.packed, self.bias)

    def extra_repr(self) -> str:
        groups = f", group={self.group}" if self.group else ""
        return f"{self.in_features}, {self.out_features}, bits={self.bits}{groups}"
