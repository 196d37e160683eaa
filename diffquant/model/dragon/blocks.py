"""The attention block of a Dragon model, as plain data. The modules are named as the checkpoints name them."""

from dataclasses import dataclass
from typing import ClassVar

from diffquant.family.spec import DiffSpec
from diffquant.model.blocks import Block, Parameter, Parameters, TokenRows, below, linear, token_rows
from diffquant.recipe.targets import LAYER_TARGETS

# What the gate of an output channel has beside its projection; no checkpoint stores it.
GATE_BIAS = 1.15


@dataclass(frozen=True)
class TensorProductBlock(Block):
    """Attention whose keys and values are products of two factors of the token, mixed with those of the token before.

    Attributes:
        layer: number of its layer.
        spec: specification of the attention.
        width: hidden width.
        rank: number of products that keys, and values, are the mean of.
        eps: epsilon of the norms of queries and keys.
        reach: number of tokens before its own that a query sees, up to which the logarithm of its place grows too;
            None for all.
    """

    module = "diffquant.model.dragon.attention:TensorProductAttention"
    kind = "tensor-product attention"
    targets: ClassVar[tuple[str, ...]] = LAYER_TARGETS

    layer: int
    spec: DiffSpec
    width: int
    rank: int
    eps: float
    reach: int | None

    @property
    def window(self) -> int | None:
        """Number of newest tokens that a query sees, itself included, or None if there is no window."""
        return None if self.reach is None else self.reach + 1

    @property
    def groups(self) -> int:
        """Number of groups of signal heads, each with a noise head, a KV head and a λ of its own."""
        return self.spec.kv_pairs

    def mixer_parameters(self) -> Parameters:
        """Parameters below `mixer`, which the models' owners leave at 16 bits."""
        spec, head = self.spec, self.spec.head_dim
        parameters = linear("c_q", spec.layout.height("q_proj"), self.width, packing="named", projection="q_proj")
        for of in "kv":
            parameters |= linear(f"W_A_{of}", self.groups * self.rank, self.width, packing="named")
            parameters |= linear(f"W_B_{of}", self.rank * head, self.width, packing="named")
            parameters |= linear(f"shift_proj_{of}", self.groups, self.width, packing="named")
        return {
            **parameters,
            **linear("lambda_proj", self.groups, self.width, packing="named"),
            **{f"{of}_norm.norm.weight": Parameter((head,)) for of in "qk"},
            "softmax_scaler": Parameter((spec.query_heads,), is_wide=True),
        }

    def parameters(self) -> Parameters:
        inner = self.spec.pairs * self.spec.value_dim
        outer = linear("gate_proj", inner, self.width) | linear("mixer_proj", self.width, inner)
        return below("mixer", self.mixer_parameters()) | outer

    @property
    def stored(self) -> TokenRows:
        return token_rows(self.spec, self.window)
