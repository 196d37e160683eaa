"""A model's architecture as plain data, usable without importing transformers, which takes seconds."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar

from diffquant.errors import UsageError
from diffquant.family.spec import DiffSpec
from diffquant.model.blocks import (
    AttentionBlock,
    Block,
    Blocks,
    CachedShapes,
    MLPBlock,
    Parameters,
    ParameterSpec,
    RMSNormBlock,
    Shape,
)
from diffquant.recipe import Recipe
from diffquant.recipe.scheme import Scheme
from diffquant.recipe.targets import LAYER_TARGETS, check_layer_overrides

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Architecture(ABC):
    """A decoder-only model: its sizes, named as in Llama, and the blocks of its layers.

    Its parameters and other properties are derived from them without building a model.

    Attributes:
        model: "module:class" of the `CausalModel` that runs it.
        export: "module:class" of the `Decoder` that builds an exported graph from its blocks; "" if there is none.
        served: "module:class" of its model for vLLM; "" if there is none.
        modelling_file: file in diffquant/quantization that runs it in transformers without diffquant; "" if there is
            none. Subclasses do not inherit it.
        makers_pack_experts: whether the model's authors define their own layout of NVFP4 experts; they define none for
            other weights or formats.
        diff_spec: specification of the attention.
    """

    model: ClassVar[str]
    export: ClassVar[str] = ""
    served: ClassVar[str] = ""
    modelling_file: ClassVar[str] = ""
    makers_pack_experts: ClassVar[bool] = False

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    max_position_embeddings: int
    initializer_range: float
    pad_token_id: int | None
    bos_token_id: int | None
    eos_token_id: int | list[int] | None
    tie_word_embeddings: bool
    diff_spec: DiffSpec

    @property
    @abstractmethod
    def layers(self) -> Sequence[Blocks]:
        """Blocks of each layer by module name; the token mixer comes first."""

    @property
    @abstractmethod
    def final_norm(self) -> tuple[str, Block]:
        """Name and block of the final norm."""

    @property
    def unused_parameters(self) -> Parameters:
        """Parameters, by full name, that checkpoints contain but the model does not use; commands copy them."""
        return {}

    @property
    def settings(self) -> dict[str, Any]:
        """Values of all fields by name, except `diff_spec`."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "diff_spec"}
        # A copy, since callers such as transformers write into it.
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in own.items()}

    @cached_property
    def config(self) -> "PreTrainedConfig":
        """transformers configuration from which its model is built."""
        return resolve_name(self.model).config_class(**self.settings, spec=self.diff_spec.to_dict())

    def new_model(self) -> "PreTrainedModel":
        """Create an untrained model. This imports transformers."""
        return resolve_name(self.model)(self.config)

    @cached_property
    def parameters(self) -> Parameters:
        """All parameters by full name; a tied output head is not listed."""
        matrix = ParameterSpec((self.vocab_size, self.hidden_size), packing="named")
        name, norm = self.final_norm
        blocks = {f"layers.{i}.{part}": block for i, layer in enumerate(self.layers) for part, block in layer.items()}
        return {
            "model.embed_tokens.weight": matrix,
            **{
                f"model.{place}.{parameter}": what
                for place, block in (blocks | {name: norm}).items()
                for parameter, what in block.parameter_specs().items()
            },
            **({} if self.tie_word_embeddings else {"lm_head.weight": matrix}),
        }

    def linear_shapes(self) -> dict[str, Shape]:
        """Return the shapes [..., out, in] of the weights that a recipe's `weights` applies to, by full name."""
        return {name: each.shape for name, each in self.parameters.items() if each.packing == "weights"}

    @property
    def layer_kinds(self) -> Sequence[str]:
        """Description of each layer, joined from its blocks' kinds, such as "latent attention with experts"."""
        return [" with ".join(block.kind for block in layer.values() if block.kind) for layer in self.layers]

    @cached_property
    def target_layers(self) -> Mapping[str, Sequence[int]]:
        """0-based indices of the layers that have each of `LAYER_TARGETS`, by target.

        For example, those of "k" are the layers that cache keys.
        """
        targets = [{target for block in layer.values() for target in block.targets} for layer in self.layers]
        return {target: [i for i, own in enumerate(targets) if target in own] for target in LAYER_TARGETS}

    @cached_property
    def cached_shapes(self) -> Mapping[int, CachedShapes]:
        """Shapes of the keys and values cached per token, by layer index; layers that cache none are left out."""
        blocks = ((i, block) for i, layer in enumerate(self.layers) for block in layer.values())
        return {i: block.cached_shapes for i, block in blocks if isinstance(block.cached_shapes, CachedShapes)}

    @property
    def has_recurrent_states(self) -> bool:
        """Whether some layers cache a recurrent state, as Mamba layers do."""
        stored = (block.cached_shapes for layer in self.layers for block in layer.values())
        return any(kept is not None and not isinstance(kept, CachedShapes) for kept in stored)

    def check_recipe(self, recipe: Recipe) -> None:
        """Check that a recipe for cache and logits is valid for the model's layers.

        Raises:
            UsageError: an override matches no layer, the recipe rotates keys or values that several layers read, or a
                group size does not divide the width of keys or values.
        """
        check_layer_overrides(recipe.overrides, self.target_layers)
        self._check_groups(recipe)
        rotates = any(each.has_transform("rotated") for each in recipe.schemes_of("k") | recipe.schemes_of("v"))
        if rotates and self.target_layers["k"] != self.target_layers["logits"]:
            raise UsageError(
                f"{type(self).__name__} has layers that read the keys and values of another layer, which cannot be "
                "rotated; leave out :rotated"
            )

    def _check_groups(self, recipe: Recipe) -> None:
        """Check that group sizes divide the widths of cached keys and values."""
        for layer, rows in self.cached_shapes.items():
            at_layer = recipe.at_layer(layer)
            for target, (_, width) in (("k", rows.keys), ("v", rows.values)):
                scheme: Scheme = getattr(at_layer, target)
                if scheme.granularity == "group" and scheme.granularity_size and width % scheme.granularity_size:
                    raise UsageError(
                        f"{target} at {scheme}: groups of {scheme.granularity_size} channels do not divide layer "
                        f"{layer}'s heads of {width}; use another granularity or format, such as e4m3:token"
                    )


# Defaults of a config.json in this package's format.
DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
}


@dataclass(frozen=True, kw_only=True)
class TransformerArchitecture(Architecture):
    """A Transformer with Llama's layers, whose attention is differential or plain.

    Attributes:
        rope_parameters: rotary settings in transformers' standard form: "rope_type", "rope_theta" and further settings
            of that type.
    """

    model = "diffquant.model.modeling:DiffTransformer"
    export = "diffquant.onnx.architectures.transformer:TransformerDecoder"
    served = "diffquant.serving.vllm.model:DiffForCausalLM"
    modelling_file = "modeling_diffquant.py"

    rms_norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    rope_parameters: Mapping[str, Any]

    @cached_property
    def layers(self) -> Sequence[Blocks]:
        norm = self.final_norm[1]
        return [
            {
                "self_attn": AttentionBlock(layer, self.diff_spec, self.hidden_size, self.attention_bias),
                "mlp": self.mlp_block(layer),
                "input_layernorm": norm,
                "post_attention_layernorm": norm,
            }
            for layer in range(self.num_hidden_layers)
        ]

    def mlp_block(self, layer: int) -> Block:  # noqa: ARG002  subclasses may depend on it
        """Return the MLP block of a 0-based layer."""
        return MLPBlock(self.hidden_size, self.intermediate_size, self.hidden_act, self.mlp_bias)

    @property
    def final_norm(self) -> tuple[str, Block]:
        return "norm", RMSNormBlock(self.hidden_size, self.rms_norm_eps)
