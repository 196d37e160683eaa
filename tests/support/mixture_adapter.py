"""A toy mixture of experts as plain data, read from a config.json: one of the three files that such a model takes.

Its attention is that of the model_type named by "attention"; its experts are Mixtral's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diffquant.model.adapters import Adapter, adapter_for
from diffquant.model.architecture import TransformerArchitecture
from diffquant.model.blocks import Block, Parameters, ParameterSpec, linear_parameters


@dataclass(frozen=True)
class ExpertsBlock(Block):
    """A router, and networks of which each token takes some.

    Attributes:
        width: hidden width.
        inner: width of an expert between its two steps.
        experts: number of experts.
        chosen: number of those that a token takes.
        is_transposed: whether each `down_proj` is stored [in, out].
    """

    module = "tests.support.mixture:Mixture"
    export = "tests.support.mixture_export:mixture"
    kind = "experts"

    width: int
    inner: int
    experts: int
    chosen: int
    is_transposed: bool = False

    def parameter_specs(self) -> Parameters:
        down = (self.inner, self.width) if self.is_transposed else (self.width, self.inner)
        return {
            **linear_parameters("gate", self.experts, self.width, packing="named"),
            "experts.gate_up_proj": ParameterSpec((self.experts, 2 * self.inner, self.width), "weights"),
            "experts.down_proj": ParameterSpec(
                (self.experts, *down), "weights", contracted=-2 if self.is_transposed else -1
            ),
        }


@dataclass(frozen=True, kw_only=True)
class MixtureArchitecture(TransformerArchitecture):
    """A Transformer with experts in all layers but the first ones."""

    model = "tests.support.mixture:MixtureModel"

    num_local_experts: int
    num_experts_per_tok: int
    dense_layers: int = 0
    is_transposed: bool = False

    def mlp_block(self, layer: int) -> Block:
        if layer < self.dense_layers:
            return super().mlp_block(layer)
        experts = self.num_local_experts, self.num_experts_per_tok
        return ExpertsBlock(self.hidden_size, self.intermediate_size, *experts, self.is_transposed)


def read_mixture(config: Mapping[str, Any]) -> Adapter:
    """Adapter of a toy's config.json."""
    base = adapter_for({**config, "model_type": config["attention"]}).architecture
    own = {name: config[name] for name in ("num_local_experts", "num_experts_per_tok")}
    own |= {name: config[name] for name in ("dense_layers", "is_transposed") if name in config}
    return Adapter(MixtureArchitecture(**base.settings, **own, diff_spec=base.diff_spec))
