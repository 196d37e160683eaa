"""The modules of a toy mixture of experts: the second file that such a model takes."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, one_hot, silu

from diffquant.model.config import ArchitectureConfig
from diffquant.model.linears import add_linears
from diffquant.model.modeling import DiffTransformer
from tests.support.mixture_adapter import ExpertsBlock, MixtureArchitecture


class Mixture(nn.Module):
    """The sum of the chosen experts' outputs, each weighted by its share of the router's softmax."""

    gate: nn.Linear

    def __init__(self, block: ExpertsBlock) -> None:
        super().__init__()
        self.chosen, self.is_transposed = block.chosen, block.is_transposed
        add_linears(self, block)
        shapes = {name: parameter.shape for name, parameter in block.parameter_specs().items()}
        parts = ("gate_up_proj", "down_proj")
        self.experts = nn.ParameterDict({part: torch.zeros(shapes[f"experts.{part}"]) for part in parts})

    def forward(self, x: Tensor) -> Tensor:
        """Every expert on every token [B, T, D]: plain, not fast."""
        shares, chosen = self.gate(x).float().softmax(-1).topk(self.chosen)
        shares = shares / shares.sum(-1, keepdim=True)
        weights = (one_hot(chosen, self.gate.out_features) * shares[..., None]).sum(-2).to(x.dtype)
        outputs = []
        for gate_up, down in zip(self.experts["gate_up_proj"], self.experts["down_proj"], strict=True):
            gate, up = linear(x, gate_up).chunk(2, -1)
            outputs.append(linear(silu(gate) * up, down.mT if self.is_transposed else down))
        return torch.stack(outputs, -1).mul(weights[..., None, :]).sum(-1)


class MixtureConfig(ArchitectureConfig, architecture=MixtureArchitecture):
    model_type = "mixture"


class MixtureModel(DiffTransformer):
    config_class = MixtureConfig
