"""Blocks that layers are composed of, as plain data: their parameters, what they keep in a cache and what runs them.

Verbs that build no model, such as `inspect` and `quantize`, need no more than this.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, ClassVar, Literal

from diffquant.family.heads import PROJECTIONS, Projection
from diffquant.family.lam import LAMBDA_VECTORS
from diffquant.family.spec import DiffSpec
from diffquant.model.activations import activation_named
from diffquant.recipe.targets import LAYER_TARGETS

if TYPE_CHECKING:
    from torch import nn

Shape = tuple[int, ...]
Packing = Literal["weights", "named", "never"]


@dataclass(frozen=True)
class Parameter:
    """A parameter of a model.

    Attributes:
        shape: its shape; [out, in] of a matrix, [experts, out, in] of experts in one tensor.
        packing: what packs it: a recipe's `weights`, only an override that names it, or nothing.
        projection: projection whose heads the rows are, in the order of `HeadLayout`; None if rows are not heads.
        is_wide: whether it stays in float32 where the model is in a half type.
        contracted: axis that products sum over. Scales and packed codes run along the last one.
    """

    shape: Shape
    packing: Packing = "never"
    projection: Projection | None = None
    is_wide: bool = False
    contracted: int = -1


Parameters = dict[str, Parameter]


@dataclass(frozen=True)
class TokenRows:
    """Keys and values that attention keeps of each token.

    Attributes:
        keys: number of key heads and their width.
        values: number of values and their width.
        window: number of newest tokens that are seen; None if there is no window.
    """

    keys: tuple[int, int]
    values: tuple[int, int]
    window: int | None = None


class Block(ABC):
    """A part of a layer: a mixer of tokens, a network or a norm.

    Attributes:
        module: "module:class" that runs it, which takes the block.
        kind: name that people know a layer with it by; "" for what every layer has.
        targets: those of a recipe's `LAYER_TARGETS` that it has.
        stored: what it keeps in a cache: rows of each token, the shapes of a state without the batch, or None.
    """

    module: ClassVar[str]
    kind: str = ""
    targets: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def parameters(self) -> Parameters:
        """Its parameters by their names below the block."""

    @property
    def stored(self) -> TokenRows | tuple[Shape, ...] | None:
        return None

    def new_module(self) -> "nn.Module":
        """The module that computes it, with parameters as they are before any training."""
        module: nn.Module = resolve_name(self.module)(self)
        return module


Blocks = Mapping[str, Block]


def linear(
    name: str,
    out: int,
    width: int,
    *,
    biased: bool = False,
    packing: Packing = "weights",
    projection: Projection | None = None,
) -> Parameters:
    """Parameters of a Linear [out, width]."""
    parameters = {f"{name}.weight": Parameter((out, width), packing, projection)}
    return parameters | ({f"{name}.bias": Parameter((out,), projection=projection)} if biased else {})


def below(place: str, parameters: Parameters) -> Parameters:
    """Parameters of a part of a block, by their names below the block."""
    return {f"{place}.{name}": parameter for name, parameter in parameters.items()}


def pair_parameters(spec: DiffSpec, *, is_wide: bool = False) -> Parameters:
    """λ vectors, which may have to stay wide, and the norm of a pair."""
    vectors = LAMBDA_VECTORS if spec.lam == "exp" else ()
    norm = {"subln.weight": Parameter((spec.value_dim,))} if spec.post_norm == "affine" else {}
    return {name: Parameter((spec.head_dim,), is_wide=is_wide) for name in vectors} | norm


def token_rows(spec: DiffSpec, window: int | None = None) -> TokenRows:
    """Rows of each token that attention of a kind keeps."""
    return TokenRows((spec.key_heads, spec.head_dim), (spec.kv_pairs, spec.value_dim), window)


@dataclass(frozen=True)
class AttentionBlock(Block):
    """Attention with a projection each for Q, K and V.

    Attributes:
        layer: number of its layer, which λ_init depends on.
        spec: specification of the attention.
        width: hidden width.
        biased: whether the four projections have biases.
    """

    module = "diffquant.model.attention:DiffAttention"
    kind = "attention"
    targets = LAYER_TARGETS

    layer: int
    spec: DiffSpec
    width: int
    biased: bool

    def parameters(self) -> Parameters:
        spec, inner = self.spec, self.spec.pairs * self.spec.value_dim
        parameters: Parameters = {}
        for name in PROJECTIONS:
            height = spec.layout.height(name)
            parameters |= linear(name, height, self.width, biased=self.biased, projection=name)
        parameters |= linear("o_proj", self.width, inner, biased=self.biased)
        if spec.gates:
            parameters |= linear("lambda_proj", spec.gates, self.width, packing="named")
        if spec.output_gate:
            parameters |= linear("output_gate_proj", inner, self.width, packing="named")
        return parameters | pair_parameters(spec)

    @property
    def stored(self) -> TokenRows:
        return token_rows(self.spec)


@dataclass(frozen=True)
class MLPBlock(Block):
    """A gated network.

    Attributes:
        width: hidden width.
        inner: width between its two steps.
        activation: name of what it does to its gate.
        biased: whether its matrices have biases.
    """

    module = "diffquant.model.mlp:DiffMLP"

    width: int
    inner: int
    activation: str
    biased: bool = False

    def parameters(self) -> Parameters:
        own = activation_named(self.activation).parameters
        return {
            **linear("gate_proj", self.inner, self.width, biased=self.biased),
            **linear("up_proj", self.inner, self.width, biased=self.biased),
            **linear("down_proj", self.width, self.inner, biased=self.biased),
            **{f"act_fn.{name}": Parameter((len(values),)) for name, values in own.items()},
        }


@dataclass(frozen=True)
class RMSNormBlock(Block):
    """An RMSNorm with a weight."""

    width: int
    eps: float

    def parameters(self) -> Parameters:
        return {"weight": Parameter((self.width,))}

    def new_module(self) -> "nn.Module":
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        norm: nn.Module = LlamaRMSNorm(self.width, self.eps)
        return norm
