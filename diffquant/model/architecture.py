"""A model's architecture as plain data: importing transformers takes longer than most work on checkpoints."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar

from diffquant.errors import UsageError
from diffquant.family.spec import DiffSpec
from diffquant.model.blocks import Block, Blocks, Parameter, Parameters, Shape, TokenRows
from diffquant.recipe import Recipe
from diffquant.recipe.targets import LAYER_TARGETS
from diffquant.scheme import Scheme

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Architecture(ABC):
    """A decoder-only model: its sizes as Llama names them, and the blocks that its layers are composed of.

    Everything known of it without a model is derived from these, above all its table of parameters.

    Attributes:
        model: "module:class" of the `CausalModel` that runs it.
        makers_pack_experts: whether its makers have a layout of their own for experts in NVFP4, and for nothing else.
        diff_spec: specification of the attention.
    """

    model: ClassVar[str]
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
        """Blocks of each layer by the names of their modules; the mixer of tokens comes first."""

    @property
    @abstractmethod
    def final_norm(self) -> tuple[str, Block]:
        """Name and block of the norm behind the layers."""

    @property
    def carried(self) -> Parameters:
        """Parameters by full name that a checkpoint holds but the model does not run; verbs carry them along."""
        return {}

    @property
    def settings(self) -> dict[str, Any]:
        """All fields except the attention's specification."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "diff_spec"}
        # A copy, since callers such as transformers write into it.
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in own.items()}

    @cached_property
    def config(self) -> "PreTrainedConfig":
        """Configuration that its model is built from."""
        return resolve_name(self.model).config_class(**self.settings, spec=self.diff_spec.to_dict())

    def new_model(self) -> "PreTrainedModel":
        """An untrained model; this is the only place that imports transformers."""
        return resolve_name(self.model)(self.config)

    @cached_property
    def parameters(self) -> Parameters:
        """Every parameter by its full name; a tied head is not one."""
        matrix = Parameter((self.vocab_size, self.hidden_size), packing="named")
        name, norm = self.final_norm
        blocks = {f"layers.{i}.{part}": block for i, layer in enumerate(self.layers) for part, block in layer.items()}
        return {
            "model.embed_tokens.weight": matrix,
            **{
                f"model.{place}.{parameter}": what
                for place, block in (blocks | {name: norm}).items()
                for parameter, what in block.parameters().items()
            },
            **({} if self.tie_word_embeddings else {"lm_head.weight": matrix}),
        }

    def linear_shapes(self) -> dict[str, Shape]:
        """Shape [..., out, in] of each weight that a recipe's `weights` applies to, by full name."""
        return {name: each.shape for name, each in self.parameters.items() if each.packing == "weights"}

    @property
    def layer_kinds(self) -> Sequence[str]:
        """Kind of each layer, named after its blocks."""
        return [" with ".join(block.kind for block in layer.values() if block.kind) for layer in self.layers]

    @cached_property
    def target_layers(self) -> Mapping[str, Sequence[int]]:
        """Indices of the layers that have each of `recipe.LAYER_TARGETS`: logits, or their own keys and values."""
        targets = [{target for block in layer.values() for target in block.targets} for layer in self.layers]
        return {target: [i for i, own in enumerate(targets) if target in own] for target in LAYER_TARGETS}

    @cached_property
    def token_rows(self) -> Mapping[int, TokenRows]:
        """Keys and values that layers cache per token, by layer index."""
        blocks = ((i, block) for i, layer in enumerate(self.layers) for block in layer.values())
        return {i: block.stored for i, block in blocks if isinstance(block.stored, TokenRows)}

    def check_recipe(self, recipe: Recipe) -> None:
        """Check that a recipe for cache and logits fits the model's layers.

        Raises:
            UsageError: an override matches no layer, keys or values are rotated that more than one layer reads, or a
                group does not divide their width.
        """
        recipe.check_layers(self.target_layers)
        self._check_groups(recipe)
        if recipe.rotates_cache and self.target_layers["k"] != self.target_layers["logits"]:
            raise UsageError(
                f"{type(self).__name__} has layers that read the keys and values of another one, and those cannot be "
                "rotated; leave out :rotated"
            )

    def _check_groups(self, recipe: Recipe) -> None:
        """Check that groups of channels divide the heads of the keys and values that are cached."""
        for layer, rows in self.token_rows.items():
            at_layer = recipe.at_layer(layer)
            for target, (_, width) in (("k", rows.keys), ("v", rows.values)):
                scheme: Scheme = getattr(at_layer, target)
                if scheme.granularity == "group" and scheme.size and width % scheme.size:
                    raise UsageError(
                        f"{target} at {scheme}: groups of {scheme.size} channels do not divide layer {layer}'s heads "
                        f"of {width}; use another granularity or format, such as e4m3:token"
                    )
