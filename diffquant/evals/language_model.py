"""Language models: what a task may ask of a model, whatever runs it: torch, or an exported graph's runtime."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, Self

import torch
from torch import Tensor

from diffquant.evals.prefixes import shares_prefixes, takes_padding
from diffquant.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class States(ABC):
    """A model's answer at some positions, before vocabulary logits are made of it.

    Logits are many times larger than what they are made of, so a task selects the positions that it scores
    first, and asks for their logits a part at a time.

    Attributes:
        values: [..., W], one vector a position.
    """

    values: Tensor

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, positions: "Tensor | slice | int | tuple[slice, int]") -> Self:
        """The states at some positions, as indexing `values` picks them."""
        return replace(self, values=self.values[positions])

    def split(self, count: int) -> list[Self]:
        """Consecutive parts of `count` positions at most."""
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
    """The states of one model at all positions of several parts."""
    return replace(parts[0], values=torch.cat([part.values for part in parts]))


@dataclass(frozen=True)
class LogitStates(States):
    """The states of a model that gives logits at once: `values` are the logits."""

    @property
    def vocabulary(self) -> int:
        return int(self.values.shape[-1])

    def logits(self) -> Tensor:
        return self.values.float().clone()

    def exact_logits(self) -> Tensor:
        return self.values.float()


class TokenCache(Protocol):
    """What a model keeps of the tokens that each sequence of a batch has read."""

    def select(self, rows: Tensor) -> None:
        """Keep these sequences, in this order; one may be named several times."""

    def branch(self) -> Self:
        """A cache of the same tokens that is extended apart."""


class LanguageModel(ABC):
    """A causal language model under evaluation."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device that token ids are passed on."""

    @property
    @abstractmethod
    def recipe(self) -> Recipe:
        """The schemes that the model computes its cache and its logits with."""

    @property
    def has_cache(self) -> bool:
        """Whether the model can go on from tokens that it read before."""
        return True

    @property
    def shares_prefixes(self) -> bool:
        """Whether a prefix computed once serves every continuation of it."""
        return self.has_cache and shares_prefixes(self.recipe)

    @property
    def takes_padding(self) -> bool:
        """Whether padding before a whole sequence leaves its states as they are."""
        return takes_padding(self.recipe)

    @abstractmethod
    def max_length(self, tokenizer: "PreTrainedTokenizerBase | None") -> int:
        """Number of tokens that the model sees at once; what the tokenizer says where the model does not."""

    @abstractmethod
    def new_cache(self) -> TokenCache:
        """An empty cache."""

    @abstractmethod
    def read(self, ids: Tensor, mask: Tensor | None = None, cache: TokenCache | None = None) -> States:
        """The states after each token.

        Args:
            ids: [B, T] new tokens.
            mask: [B, S] over cached and new tokens, 0 where padding; None without padding.
            cache: what `new_cache` gave, extended in place; None to keep nothing.

        Returns:
            States of [B, T] positions.
        """

    @abstractmethod
    def generate(
        self,
        prompt: Sequence[int],
        new_tokens: int,
        stops: Sequence[str],
        tokenizer: "PreTrainedTokenizerBase",
        sampling: Mapping[str, object],
    ) -> list[int]:
        """The tokens that follow a prompt, until one of the stop strings appears or there are `new_tokens`.

        Args:
            sampling: what transformers' `generate` takes; empty for greedy decoding.

        Raises:
            UsageError: the model cannot sample.
        """
