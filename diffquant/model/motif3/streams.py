"""Residual streams: what a part of a layer reads of them, how they mix, and where its output goes.

Source: manifold-constrained hyper-connections, arXiv 2512.24880; the clips, the order of rows and columns and the
number of rounds are those of Motif-3's own code.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

from diffquant.model.motif3.blocks import StreamsBlock
from diffquant.numbers.absmax import compute_dtype

EPS = 1e-6
LARGEST_GATE, LARGEST_MIX = 10.0, 20.0
SMALLEST_SUM = 1e-8


class Streams(nn.Module):
    """The gates of one part of a layer, computed from all streams X [B, T, E, D] of a token, in float32 at least."""

    def __init__(self, block: StreamsBlock) -> None:
        super().__init__()
        self.block = block
        width = block.streams * block.width
        self.rms_norm = nn.RMSNorm(width, EPS)
        for name, shape in block.gates.items():
            self.add_module(f"proj_{name}", nn.Linear(width, torch.Size(shape).numel(), bias=False))
            self.register_parameter(f"alpha_{name}", nn.Parameter(torch.zeros(1)))
            self.register_parameter(f"bias_{name}", nn.Parameter(torch.zeros(shape)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A part's input [B, T, D], the mixed streams [B, T, E, D], and its output's factors [B, T, E]."""
        wide = x.to(compute_dtype(x))
        flat = wide.flatten(-2)
        n = rms_norm(flat, flat.shape[-1:], self.rms_norm.weight.to(flat.dtype), EPS)
        reads = self._gate("pre", n, LARGEST_GATE).sigmoid()
        writes = self._gate("post", n, LARGEST_GATE).sigmoid() * self.block.post_scale
        mix = balanced(self._gate("res", n, LARGEST_MIX).exp(), self.block.rounds)
        return (reads[..., None] * wide).sum(-2).to(x.dtype), mix @ wide, writes

    def _gate(self, name: str, n: Tensor, largest: float) -> Tensor:
        """α · projection + bias of a gate, [B, T, *shape], clipped."""
        names = (f"proj_{name}.weight", f"alpha_{name}", f"bias_{name}")
        weight, alpha, bias = (self.get_parameter(each).to(n.dtype) for each in names)
        raw: Tensor = linear(n, weight).unflatten(-1, self.block.gates[name])
        return (alpha * raw + bias).clamp(-largest, largest)


def balanced(mix: Tensor, rounds: int) -> Tensor:
    """Positive matrices [..., E, E] after repeatedly dividing rows, then columns, by their sums.

    Source: Sinkhorn and Knopp, 1967.
    """
    for _ in range(rounds):
        mix = mix / mix.sum(-1, keepdim=True).clamp(min=SMALLEST_SUM)
        mix = mix / mix.sum(-2, keepdim=True).clamp(min=SMALLEST_SUM)
    return mix


def written(mixed: Tensor, y: Tensor, writes: Tensor) -> Tensor:
    """Streams [B, T, E, D] in y's dtype: mixed ones, to which a part's output y [B, T, D] was added."""
    return (mixed + writes[..., None] * y.to(mixed.dtype)[..., None, :]).to(y.dtype)
