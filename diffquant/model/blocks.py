"""Blocks of layers as plain data: their parameters, the shapes of their caches, and the modules that run them.

Commands that build no model, such as `inspect` and `quantize`, need only this.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, ClassVar, Literal

from diffquant.family.heads import PROJECTIONS, Projection
from diffquant.family.norm import LAMBDA_VECTORS
from diffquant.family.spec import DiffSpec
from diffquant.model.activations import PARAMETERS
from diffquant.recipe.targets import LAYER_TARGETS

if TYPE_CHECKING:
    from torch import nn

Shape = tuple[int, ...]
Packing = Literal["weights", "named", "never"]


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter of a model.

    Attributes:
        shape: [out, in] for a matrix, [experts, out, in] for experts in one tensor.
        packing: when it is quantized: under a recipe's `weights` ("weights"), only under an override that names it
            ("named"), or never ("never").
        projection: name of the projection whose heads the rows are, ordered as in `HeadLayout`, or None if rows are not
            heads.
        is_float32: whether it stays in float32 if the model is in float16 or bfloat16.
        contracted: axis that matrix products sum over. Scales and packed codes run along the last axis.
        by_head: whether attention multiplies each head's rows separately, some of them transposed. Exports store values
            of such a parameter instead of codes.
        is_large: whether exports treat it like parameters with packing "weights", although its packing is "named".
    """

    shape: Shape
    packing: Packing = "never"
    projection: Projection | None = None
    is_float32: bool = False
    contracted: int = -1
    by_head: bool = False
    is_large: bool = False


Parameters = dict[str, ParameterSpec]


@dataclass(frozen=True)
class CachedShapes:
    """Shapes of the keys and values that an attention layer caches per token.

    Attributes:
        keys: number of key heads and their width.
        values: number of value heads and their width.
        window: number of newest tokens that a query sees, or None if there is no window.
        is_latent: whether the cached value is a latent, from which keys and values of all heads are computed, and the
            cached key holds the rotated channels that complete the keys.
    """

    keys: tuple[int, int]
    values: tuple[int, int]
    window: int | None = None
    is_latent: bool = False


class Block(ABC):
    """A part of a layer: a token mixer, an MLP or a norm.

    Attributes:
        module: "module:class" of the module that runs it; the class takes the block as its argument.
        export: "module:function" that adds it to an exported graph; "" if it cannot be exported.
        kind: name for a layer with this block; "" if the block does not distinguish layers.
        targets: the `LAYER_TARGETS` of a recipe that apply to it.
        cached_shapes: `CachedShapes` of what it caches per token, a recurrent state's shapes without the batch
            axis, or None if it caches nothing.
    """

    module: ClassVar[str]
    export: ClassVar[str] = ""
    kind: str = ""
    targets: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def parameter_specs(self) -> Parameters:
        """Return the block's parameters by their names within the block."""

    @property
    def cached_shapes(self) -> CachedShapes | tuple[Shape, ...] | None:
        return None

    @property
    def export_function(self) -> str:
        """The block's `export`, or "" if its class inherits `export` but changes the module or the parameters."""
        for kind in type(self).__mro__:
            if "export" in vars(kind):
                return kind.export if issubclass(kind, Block) else ""
            if {"module", "parameter_specs", "new_module"} & vars(kind).keys():
                break
        return ""

    def new_module(self) -> "nn.Module":
        """Create the module that runs the block, with untrained parameters."""
        module: nn.Module = resolve_name(self.module)(self)
        return module


Blocks = Mapping[str, Block]


def linear_parameters(
    name: str,
    out: int,
    width: int,
    *,
    biased: bool = False,
    packing: Packing = "weights",
    projection: Projection | None = None,
) -> Parameters:
    """Return the parameters of a Linear called `name`: a weight [out, width] and, if `biased`, a bias [out].

    `packing` and `projection` are as in `ParameterSpec`.
    """
    parameters = {f"{name}.weight": ParameterSpec((out, width), packing, projection)}
    return parameters | ({f"{name}.bias": ParameterSpec((out,), projection=projection)} if biased else {})


def prefix_names(place: str, parameters: Parameters) -> Parameters:
    """Prefix the names of parameters with `place`, the name of the module that contains them, and a dot."""
    return {f"{place}.{name}": parameter for name, parameter in parameters.items()}


def lam_and_norm_parameters(spec: DiffSpec, *, is_float32: bool = False) -> Parameters:
    """Return the λ vectors and the pair norm's weight of an attention, as far as it has them.

    `is_float32` applies to the λ vectors, as in `ParameterSpec`.
    """
    vectors = LAMBDA_VECTORS if spec.lam == "exp" else ()
    norm = {"subln.weight": ParameterSpec((spec.value_dim,))} if spec.post_norm == "affine" else {}
    return {name: ParameterSpec((spec.head_dim,), is_float32=is_float32) for name in vectors} | norm


def cached_shapes(spec: DiffSpec, window: int | None = None) -> CachedShapes:
    """Return the shapes that attention with this specification caches per token."""
    return CachedShapes((spec.key_heads, spec.head_dim), (spec.kv_pairs, spec.value_dim), window)


@dataclass(frozen=True)
class AttentionBlock(Block):
    """Attention with separate projections for Q, K and V.

    Attributes:
        layer: 0-based index of its layer, which λ_init depends on.
        spec: specification of the attention.
        width: hidden width.
        biased: whether the four projections have biases.
    """

    module = "diffquant.model.attention:DiffAttention"
    export = "diffquant.onnx.architectures.transformer:add_attention"
    kind = "attention"
    targets = LAYER_TARGETS

    layer: int
    spec: DiffSpec
    width: int
    biased: bool

    def parameter_specs(self) -> Parameters:
        spec, inner = self.spec, self.spec.pairs * self.spec.value_dim
        parameters: Parameters = {}
        for name in PROJECTIONS:
            height = spec.layout.row_count(name)
            parameters |= linear_parameters(name, height, self.width, biased=self.biased, projection=name)
        parameters |= linear_parameters("o_proj", self.width, inner, biased=self.biased)
        if spec.gate_count:
            parameters |= linear_parameters("lambda_proj", spec.gate_count, self.width, packing="named")
        if spec.output_gate:
            parameters |= linear_parameters("output_gate_proj", inner, self.width, packing="named")
        return parameters | lam_and_norm_parameters(spec)

    @property
    def cached_shapes(self) -> CachedShapes:
        return cached_shapes(self.spec)


@dataclass(frozen=True)
class MLPBlock(Block):
    """A gated MLP.

    Attributes:
        width: hidden width.
        inner: intermediate width.
        activation: `hidden_act` name of the activation function.
        biased: whether its Linears have biases.
    """

    module = "diffquant.model.linears:DiffMLP"
    export = "diffquant.onnx.architectures.transformer:add_mlp"

    width: int
    inner: int
    activation: str
    biased: bool = False

    def parameter_specs(self) -> Parameters:
        own = PARAMETERS.get(self.activation, {})
        return {
            **linear_parameters("gate_proj", self.inner, self.width, biased=self.biased),
            **linear_parameters("up_proj", self.inner, self.width, biased=self.biased),
            **linear_parameters("down_proj", self.width, self.inner, biased=self.biased),
            **{f"act_fn.{name}": ParameterSpec((len(values),)) for name, values in own.items()},
        }


@dataclass(frozen=True)
class RMSNormBlock(Block):
    """An RMSNorm with a weight."""

    export = "diffquant.onnx.architectures.transformer:add_norm"

    width: int
    eps: float

    def parameter_specs(self) -> Parameters:
        return {"weight": ParameterSpec((self.width,))}

    def new_module(self) -> "nn.Module":
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        norm: nn.Module = LlamaRMSNorm(self.width, self.eps)
        return norm
