"""A model's architecture as plain data: importing transformers takes longer than most work on checkpoints."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diffquant.errors import UsageError
from diffquant.family.spec import DiffSpec
from diffquant.recipe import Recipe

if TYPE_CHECKING:
    from diffquant.model.causal import CausalModel

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Architecture(ABC):
    """A decoder-only model: its sizes as Llama names them, its parameters, and the class that runs it.

    Attributes:
        diff_spec: specification of the attention.
    """

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

    @abstractmethod
    def new_model(self) -> "CausalModel":
        """A model with parameters as they are before any training; only here transformers is imported."""

    @abstractmethod
    def parameter_shapes(self) -> dict[str, Shape]:
        """Shape of each parameter, by full name; a tied head is not one."""

    @abstractmethod
    def linear_shapes(self) -> dict[str, Shape]:
        """Shape [out, in] of each linear weight that a recipe's `weights` applies to, by full name."""

    @property
    @abstractmethod
    def layer_kinds(self) -> Sequence[str]:
        """What each layer mixes its tokens by."""

    @property
    @abstractmethod
    def target_layers(self) -> Mapping[str, Sequence[int]]:
        """Numbers of the layers that have each of `recipe.LAYER_TARGETS`: logits, or keys and values of their own."""

    @abstractmethod
    def attention_name(self, layer: int) -> str:
        """Full name of the module that holds a layer's λ."""

    @property
    def can_rotate_cache(self) -> bool:
        """Whether keys and values can be rotated before they are rounded."""
        return True

    def check_recipe(self, recipe: Recipe) -> None:
        """Check that a recipe for cache and logits fits the model's layers.

        Raises:
            UsageError: an override matches no layer, or keys or values are rotated that more than one layer reads.
        """
        recipe.check_layers(self.target_layers)
        if recipe.rotates_cache and not self.can_rotate_cache:
            raise UsageError(
                f"{type(self).__name__} has layers that read the keys and values of another one, and those cannot be "
                "rotated; leave out :rotated"
            )

    def is_wide(self, parameter: str) -> bool:  # noqa: ARG002  none is, unless an architecture says so
        """Whether a parameter stays in float32 where the model is in a half type."""
        return False
