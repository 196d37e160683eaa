"""The architecture that `DiffTransformer` runs: every layer has attention and a gated network."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from diffquant.family.heads import PROJECTIONS
from diffquant.family.lam import LAMBDA_VECTORS
from diffquant.model.activations import activation_named
from diffquant.model.architecture import Architecture, Shape
from diffquant.recipe import LAYER_TARGETS

if TYPE_CHECKING:
    from diffquant.model.config import DiffTransformerConfig
    from diffquant.model.modeling import DiffTransformer


@dataclass(frozen=True, kw_only=True)
class TransformerArchitecture(Architecture):
    """A Transformer of this family, plain ones included.

    Attributes:
        rope_parameters: rotary settings as transformers standardizes them: "rope_type", "rope_theta" and what else
            the type takes.
    """

    rms_norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    rope_parameters: Mapping[str, Any]

    @cached_property
    def config(self) -> "DiffTransformerConfig":
        """Configuration that a DiffTransformer is built from."""
        from diffquant.model.config import DiffTransformerConfig

        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "diff_spec"}
        values["rope_parameters"] = dict(self.rope_parameters)
        return DiffTransformerConfig(**values, spec=self.diff_spec.to_dict())

    def new_model(self) -> "DiffTransformer":
        from diffquant.model.modeling import DiffTransformer

        return DiffTransformer(self.config)

    def parameter_shapes(self) -> dict[str, Shape]:
        width = self.hidden_size
        shapes: dict[str, Shape] = {"model.embed_tokens.weight": (self.vocab_size, width)}
        for layer in range(self.num_hidden_layers):
            for name, shape in self._layer_parameters().items():
                shapes[f"model.layers.{layer}.{name}"] = shape
        shapes["model.norm.weight"] = (width,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, width)
        return shapes

    def linear_shapes(self) -> dict[str, Shape]:
        return {
            f"model.layers.{layer}.{name}.weight": shape
            for layer in range(self.num_hidden_layers)
            for name, shape in (self._attention_linears() | self._mlp_linears()).items()
        }

    @property
    def layer_kinds(self) -> Sequence[str]:
        return ["attention"] * self.num_hidden_layers

    @property
    def target_layers(self) -> Mapping[str, Sequence[int]]:
        return dict.fromkeys(LAYER_TARGETS, range(self.num_hidden_layers))

    def attention_name(self, layer: int) -> str:
        return f"model.layers.{layer}.self_attn"

    def _layer_parameters(self) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {}
        for linears, biased in (
            (self._attention_linears(), self.attention_bias),
            (self._mlp_linears(), self.mlp_bias),
        ):
            for name, (out, width) in linears.items():
                shapes[f"{name}.weight"] = (out, width)
                if biased:
                    shapes[f"{name}.bias"] = (out,)
        activation = activation_named(self.hidden_act)
        shapes |= {f"mlp.act_fn.{name}": (len(values),) for name, values in activation.parameters.items()}
        shapes |= {f"self_attn.{name}": shape for name, shape in self._gates_and_norm().items()}
        shapes["input_layernorm.weight"] = shapes["post_attention_layernorm.weight"] = (self.hidden_size,)
        return shapes

    def _attention_linears(self) -> dict[str, Shape]:
        spec, width = self.diff_spec, self.hidden_size
        return {
            **{f"self_attn.{projection}": (spec.layout.height(projection), width) for projection in PROJECTIONS},
            "self_attn.o_proj": (width, spec.pairs * spec.value_dim),
        }

    def _mlp_linears(self) -> dict[str, Shape]:
        width, inner = self.hidden_size, self.intermediate_size
        return {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}

    def _gates_and_norm(self) -> dict[str, Shape]:
        spec = self.diff_spec
        shapes: dict[str, Shape] = {}
        if spec.lam == "exp":
            shapes |= dict.fromkeys(LAMBDA_VECTORS, (spec.head_dim,))
        if spec.gates:
            shapes["lambda_proj.weight"] = (spec.gates, self.hidden_size)
        if spec.output_gate:
            shapes["output_gate_proj.weight"] = (spec.pairs * spec.value_dim, self.hidden_size)
        if spec.post_norm == "affine":
            shapes["subln.weight"] = (spec.value_dim,)
        return shapes
