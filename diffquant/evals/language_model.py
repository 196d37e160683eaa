"""The interface through which tasks use a model, whether torch or an exported graph's runtime runs it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, Self

import torch
from torch import Tensor

from diffquant.errors import NonFiniteError
from diffquant.evals.prefixes import shares_prefixes, takes_padding
from diffquant.recipe import Recipe
from diffquant.support.spelling import spelled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class States(ABC):
    """A model's outputs at some positions, before they are turned into vocabulary logits.

    Logits are many times larger than these states, so a task first selects the positions that it scores, and then
    asks for their logits part by part.

    Attributes:
        values: [..., W], one vector a position.
    """

    values: Tensor

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, positions: "Tensor | slice | int | tuple[slice, int]") -> Self:
        """The states at some positions, indexed as `values` would be."""
        return replace(self, values=self.values[positions])

    def split(self, count: int) -> list[Self]:
        """Consecutive parts of at most `count` positions."""
        return [replace(self, values=part) for part in self.values.split(count)]

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Number of logits at a position."""

    @abstractmethod
    def logits(self) -> Tensor:
        """float32 [..., V] in the model's own arithmetic, in memory that the caller may overwrite."""

    @abstractmethod
    def exact_logits(self) -> Tensor:
        """float32 [..., V] computed in float32, whatever the model's dtype.

        Half types would round logits as coarsely as 8-bit quantization moves them.
        """


def joined(parts: Sequence[States]) -> States:
    """Join parts of one model's states."""
    return replace(parts[0], values=torch.cat([part.values for part in parts]))


def require_finite(computed: Tensor) -> None:
    """Check what was computed with a model.

    Raises:
        NonFiniteError: some of it is NaN or infinity.
    """
    if not computed.isfinite().all():
        raise NonFiniteError(f"the model computes NaN or infinity; use {spelled('dtype', 'float32')}, or wider bits")


@dataclass(frozen=True)
class LogitStates(States):
    """States of a model that returns logits directly: `values` are the logits."""

    @property
    def vocabulary(self) -> int:
        return int(self.values.shape[-1])

    def logits(self) -> Tensor:
        return self.values.float().clone()

    def exact_logits(self) -> Tensor:
        return self.values.float()


class TokenCache(Protocol):
    """A model's cache for a batch of sequences."""

    def select(self, rows: Tensor) -> None:
        """Keep these sequences, in this order; one may be named several times."""

    def branch(self) -> Self:
        """A copy that grows independently."""


class LanguageModel(ABC):
    """A causal language model under evaluation.

    Attributes:
        tokenizer: the model's tokenizer, for what reads text.
    """

    tokenizer: "PreTrainedTokenizerBase"

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device that token ids must be on."""

    @property
    @abstractmethod
    def recipe(self) -> Recipe:
        """The recipe, whose schemes the model's cache and logits follow."""

    @property
    def has_cache(self) -> bool:
        """Whether the model can continue from a cache."""
        return True

    @property
    def shares_prefixes(self) -> bool:
        """Whether continuations can reuse a prefix that was computed once."""
        return self.has_cache and shares_prefixes(self.recipe)

    @property
    def takes_padding(self) -> bool:
        """Whether left padding leaves a sequence's states unchanged."""
        return takes_padding(self.recipe)

    @property
    @abstractmethod
    def max_length(self) -> int:
        """Length of the model's context in tokens, from the tokenizer if the model does not say."""

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Number of tokens that the model knows."""

    @abstractmethod
    def new_cache(self) -> TokenCache:
        """An empty cache."""

    @abstractmethod
    def read(self, ids: Tensor, mask: Tensor | None = None, cache: TokenCache | None = None) -> States:
        """The states after each token.

        Args:
            ids: [B, T] new tokens.
            mask: [B, S] over cached and new tokens, 0 at padding; None if there is no padding.
            cache: a cache from `new_cache`, extended in place, or None to keep nothing.

        Returns:
            States of [B, T] positions.
        """

    @abstractmethod
    def generate(
        self, prompt: Sequence[int], new_tokens: int, stops: Sequence[str], sampling: Mapping[str, object]
    ) -> list[int]:
        """Generate tokens after a prompt, until a stop string appears or there are `new_tokens`.

        Args:
            sampling: options of transformers' `generate`; empty for greedy decoding.

        Raises:
            UsageError: the model cannot sample.
        """
