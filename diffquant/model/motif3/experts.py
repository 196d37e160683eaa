"""Networks with PolyNorm: dense ones, and experts behind a sigmoid router."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from diffquant.model.activations import poly_norm
from diffquant.model.linears import add_linears
from diffquant.model.motif3.blocks import ExpertsBlock, PolyMLPBlock
from diffquant.numbers.absmax import compute_dtype

# Keeps shares finite where all chosen experts' sigmoids are 0.
SUM_EPS = 1e-20


class PolyMLP(nn.Module):
    """A gated network: down(scale · (PolyNorm(gate(x)) · up(x))), the product in float32 at least."""

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def __init__(self, block: PolyMLPBlock) -> None:
        super().__init__()
        self.poly = block.poly
        add_linears(self, block)
        self.act_fn = PolyNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        clamp, wide = self.poly.clamp, compute_dtype(x)
        gate, up = (part(x).to(wide).clamp(-clamp, clamp) for part in (self.gate_proj, self.up_proj))
        product = poly_norm(gate, *self.act_fn(self.poly.sigmoid)) * up
        out: Tensor = self.down_proj(product.to(x.dtype) * self.poly.scale)
        return out


class PolyNorm(nn.Module):
    """The parameters of PolyNorm, of one network or of several experts."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))
        self.bias = nn.Parameter(torch.zeros(*shape[:-1], 1))

    def forward(self, sigmoid: bool) -> tuple[Tensor, Tensor]:
        """Weights [..., 3] of cube, square and line, and bias [..., 1], in float32 at least."""
        weight = self.weight.to(compute_dtype(self.weight))
        return weight.sigmoid() if sigmoid else weight, self.bias.to(weight.dtype)


class Router(nn.Module):
    """The logits of experts, whose Linear stands under the name that checkpoints have for it."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)


class ExpertMatrices(nn.Module):
    """The weights of all experts in one tensor a kind, [experts, out, in], gates' rows before values'."""

    def __init__(self, block: ExpertsBlock) -> None:
        super().__init__()
        shapes = {name: each.shape for name, each in block.parameters().items()}
        self.gate_up_proj = nn.Parameter(torch.zeros(shapes["experts.gate_up_proj"]))
        self.down_proj = nn.Parameter(torch.zeros(shapes["experts.down_proj"]))
        self.act_fn = PolyNorm(block.experts, 3)


class Experts(nn.Module):
    """The sum of the chosen experts' outputs, each times its share, and of what all tokens share.

    Experts are chosen by the sigmoid of their logit plus a bias of their own, which has no part in their shares.
    """

    def __init__(self, block: ExpertsBlock) -> None:
        super().__init__()
        self.block = block
        self.router = Router(block.width, block.experts)
        self.expert_bias = nn.Parameter(torch.zeros(block.experts)) if block.biased else None
        self.experts = ExpertMatrices(block)
        self.shared_experts = PolyMLP(block.shared)

    def forward(self, x: Tensor) -> Tensor:
        """Output [B, T, D] for x [B, T, D]; an expert runs on its tokens alone."""
        tokens, wide = x.flatten(0, 1), compute_dtype(x)
        chosen, shares = self.route(tokens)
        weights, biases = self.experts.act_fn(self.block.poly.sigmoid)
        if self.block.poly.bias_clamp is not None:
            biases = biases.clamp(-self.block.poly.bias_clamp, self.block.poly.bias_clamp)
        routed = torch.zeros_like(tokens, dtype=wide)
        for expert in chosen.unique().tolist():
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            y = self._expert(expert, tokens[rows], weights[expert], biases[expert])
            routed.index_add_(0, rows, y.to(wide) * shares[rows, places, None])
        shared: Tensor = self.shared_experts(x)
        return routed.to(x.dtype).view_as(x) + shared

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of each token's experts, int64 [N, chosen], and their shares in float32 at least, for [N, D]."""
        wide = compute_dtype(tokens)
        scores = linear(tokens.to(wide), self.router.gate.weight.to(wide)).sigmoid()
        favoured = scores if self.expert_bias is None else scores + self.expert_bias.to(wide)
        chosen = favoured.topk(self.block.chosen).indices
        shares = scores.gather(1, chosen)
        if self.block.normed:
            shares = shares / (shares.sum(1, keepdim=True) + SUM_EPS)
        return chosen, shares * self.block.scale

    def _expert(self, expert: int, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        poly, wide = self.block.poly, compute_dtype(x)
        gate, up = linear(x, self.experts.gate_up_proj[expert]).to(wide).chunk(2, -1)
        product = (poly_norm(gate, weight, bias) * up).clamp(-poly.clamp, poly.clamp)
        return linear(product.to(x.dtype) * poly.scale, self.experts.down_proj[expert])
