"""MLPs with PolyNorm: dense ones, and a mixture of experts with a sigmoid router."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from diffquant.model.activations import poly_norm
from diffquant.model.linears import add_linears, compute_projection
from diffquant.model.motif3.blocks import ExpertsBlock, PolyMLPBlock
from diffquant.recipe.numbers.absmax import computing_dtype

# Keeps normalized routing weights finite if the sigmoids of all chosen experts are 0.
SUM_EPS = 1e-20


class PolyMLP(nn.Module):
    """A gated MLP: down(scale · (PolyNorm(gate(x)) · up(x))), with the elementwise product in at least float32."""

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def __init__(self, block: PolyMLPBlock) -> None:
        super().__init__()
        self.poly = block.poly
        add_linears(self, block)
        self.act_fn = PolyNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        clamp, wide = self.poly.clamp, computing_dtype(x)
        gate, up = (part(x).to(wide).clamp(-clamp, clamp) for part in (self.gate_proj, self.up_proj))
        product = poly_norm(gate, *self.act_fn(self.poly.sigmoid)) * up
        out: Tensor = self.down_proj(product.to(x.dtype) * self.poly.scale)
        return out


class PolyNorm(nn.Module):
    """The parameters of PolyNorm for one MLP or for several experts."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))
        self.bias = nn.Parameter(torch.zeros(*shape[:-1], 1))

    def forward(self, sigmoid: bool) -> tuple[Tensor, Tensor]:
        """Return weights [..., 3] of the cubic, square and linear terms, and bias [..., 1], in at least float32.

        If `sigmoid`, the weights are the sigmoids of the stored ones.
        """
        weight = self.weight.to(computing_dtype(self.weight))
        return weight.sigmoid() if sigmoid else weight, self.bias.to(weight.dtype)


class Experts(nn.Module):
    """A mixture of experts: the chosen experts' outputs times their routing weights, plus the shared expert's output.

    Experts are chosen by the sigmoid of their router logit plus a per-expert bias. Routing weights exclude the bias.
    """

    def __init__(self, block: ExpertsBlock) -> None:
        super().__init__()
        self.block = block
        # Containers that only give parameters their checkpoint names: router.gate, experts.gate_up_proj and others.
        self.router, self.experts = nn.Module(), nn.Module()
        self.router.gate = nn.Linear(block.width, block.experts, bias=False)
        self.expert_bias = nn.Parameter(torch.zeros(block.experts)) if block.biased else None
        shapes = {name: each.shape for name, each in block.parameter_specs().items()}
        for name in ("gate_up_proj", "down_proj"):
            self.experts.register_parameter(name, nn.Parameter(torch.zeros(shapes[f"experts.{name}"])))
        self.experts.act_fn = PolyNorm(block.experts, 3)
        self.shared_experts = PolyMLP(block.shared)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output [B, T, D] for x [B, T, D]; each expert runs only on the tokens routed to it."""
        tokens, wide = x.flatten(0, 1), computing_dtype(x)
        chosen, shares = self.route(tokens)
        weights, biases = self.get_submodule("experts.act_fn")(self.block.poly.sigmoid)
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
        """Choose experts for tokens [N, D]; return their indices, int64, and routing weights, [N, chosen] each."""
        wide = computing_dtype(tokens)
        scores = compute_projection(tokens, self.get_submodule("router.gate"), wide).sigmoid()
        favoured = scores if self.expert_bias is None else scores + self.expert_bias.to(wide)
        chosen = favoured.topk(self.block.chosen).indices
        shares = scores.gather(1, chosen)
        if self.block.normed:
            shares = shares / (shares.sum(1, keepdim=True) + SUM_EPS)
        return chosen, shares * self.block.scale

    def _expert(self, expert: int, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        poly, wide = self.block.poly, computing_dtype(x)
        gate, up = linear(x, self.get_parameter("experts.gate_up_proj")[expert]).to(wide).chunk(2, -1)
        product = (poly_norm(gate, weight, bias) * up).clamp(-poly.clamp, poly.clamp)
        return linear(product.to(x.dtype) * poly.scale, self.get_parameter("experts.down_proj")[expert])
