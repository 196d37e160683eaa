"""The interface through which tasks use a model, whether torch or ONNX Runtime runs it, and the requests to score."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, Self

import torch
from torch import Tensor

from diffquant.checkpoints.texts import check_tokens
from diffquant.checkpoints.tokens import prefix_token
from diffquant.errors import DiffQuantError, NonFiniteError
from diffquant.measure import can_pad_left, can_share_prefixes
from diffquant.recipe import Recipe
from diffquant.support.names import option_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ModelOutputs:
    """A model's outputs at some positions: logits, or hidden states from which a subclass computes logits.

    Logits are many times larger than hidden states, so a task first selects the positions that it scores, and then
    computes their logits part by part.

    Attributes:
        values: [..., W], a vector of W numbers per position.
    """

    values: Tensor

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, positions: "Tensor | slice | int | tuple[slice, int]") -> Self:
        """Return the states at some positions, indexed as `values` would be."""
        return replace(self, values=self.values[positions])

    def split(self, split_size: int) -> list[Self]:
        """Split along the first axis into consecutive parts of at most `split_size` positions."""
        return [replace(self, values=part) for part in self.values.split(split_size)]

    @property
    def vocabulary_size(self) -> int:
        """Number of logits at a position."""
        return int(self.values.shape[-1])

    def logits(self) -> Tensor:
        """Compute logits in the model's dtype, and convert them to float32.

        Returns:
            [..., V] for a vocabulary of V tokens, a new tensor that the caller may overwrite.
        """
        return self.values.float().clone()

    def float32_logits(self) -> Tensor:
        """Compute logits [..., V] of a vocabulary of V tokens in float32, even if the model has another dtype.

        Computed in a 16-bit dtype, they would have rounding errors as large as the effects of 8-bit quantization.
        """
        return self.values.float()


def join_states(parts: Sequence[ModelOutputs]) -> ModelOutputs:
    """Concatenate states of one model along the first axis."""
    return replace(parts[0], values=torch.cat([part.values for part in parts]))


def require_finite(computed: Tensor) -> None:
    """Check that numbers computed with a model are finite.

    Raises:
        NonFiniteError: one is NaN or infinite.
    """
    if not computed.isfinite().all():
        raise NonFiniteError(
            f"the model computes NaN or infinity; use {option_name('dtype', 'float32')}, or wider bits"
        )


class TokenCache(Protocol):
    """A model's KV cache for a batch of sequences, such as transformers'; `copy.deepcopy` makes an independent one."""

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences with these indices, in this order; an index may occur several times."""


class LanguageModel(ABC):
    """A causal language model under evaluation.

    Attributes:
        tokenizer: the model's tokenizer, for tasks that read text.
    """

    tokenizer: "PreTrainedTokenizerBase"

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device that token ids must be on."""

    @property
    @abstractmethod
    def recipe(self) -> Recipe:
        """Quantization recipe that the model runs under."""

    @property
    def has_cache(self) -> bool:
        """Whether the model has a KV cache from which it can continue sequences."""
        return True

    @property
    def can_share_prefixes(self) -> bool:
        """Whether several continuations can reuse the cache of their common prefix."""
        return self.has_cache and can_share_prefixes(self.recipe)

    @property
    def can_take_padding(self) -> bool:
        """Whether left padding leaves a sequence's hidden states unchanged."""
        return can_pad_left(self.recipe)

    @property
    @abstractmethod
    def max_length(self) -> int:
        """Length of the model's context in tokens; the tokenizer's maximum length if the config has none."""

    @property
    @abstractmethod
    def vocabulary_size(self) -> int:
        """Size of the model's vocabulary in tokens."""

    @abstractmethod
    def new_cache(self) -> TokenCache:
        """Return an empty cache."""

    @abstractmethod
    def compute_outputs(self, ids: Tensor, mask: Tensor | None = None, cache: TokenCache | None = None) -> ModelOutputs:
        """Run the model on T new tokens of B sequences, and return its outputs [B, T, W] at each of them.

        Args:
            ids: ids of the new tokens, [B, T].
            mask: mask [B, S] of the S cached and new tokens, 0 at padding and 1 elsewhere, or None if there is no
                padding.
            cache: a cache from `new_cache`, which is extended in place, or None to use none.
        """

    @abstractmethod
    def generate(
        self, prompt: Sequence[int], new_tokens: int, stops: Sequence[str], sampling: Mapping[str, object]
    ) -> list[int]:
        """Generate the token ids that follow a prompt.

        Args:
            prompt: the prompt's token ids.
            new_tokens: largest number of tokens to generate.
            stops: strings after which generation ends.
            sampling: options of transformers' `generate`; empty for greedy decoding.

        Raises:
            UsageError: the model cannot sample.
        """


@dataclass(frozen=True)
class Request:
    """A continuation to score after a context, as token ids; neither is empty."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


class RequestEncoder:
    """Encodes a context and its continuation as lm-eval's HFLM does.

    Args:
        tokenizer: a Hugging Face tokenizer.
        max_length: length of the model's context in tokens; longer requests lose tokens on the left.
        vocabulary: size of the model's vocabulary in tokens.

    Source: lm-eval 0.4.13, `TemplateLM._encode_pair`, `HFLM.tok_encode` and `_loglikelihood_tokens`.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", max_length: int, vocabulary: int) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.vocabulary = vocabulary
        self.prefix_token = prefix_token(tokenizer)
        self._prefix_text: str = tokenizer.decode(self.prefix_token)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, with the tokenizer's special tokens unless the text already begins with one.

        Raises:
            UsageError: an id is not in the model's vocabulary.
        """
        return self._encode(text, not text.startswith(self._prefix_text))

    def encode_request(self, context: str, continuation: str) -> Request:
        """Encode a context and its continuation; spaces at the end of the context move to the continuation.

        Raises:
            DiffQuantError: the continuation has no tokens, more tokens than the model's context, or a token that is
                not in the model's vocabulary.
        """
        before, after = self._split(context, continuation)
        if not after:
            raise DiffQuantError(f"continuation {continuation!r} has no tokens after context {context[-40:]!r}")
        if len(after) > self.max_length:
            raise DiffQuantError(
                f"continuation {continuation[:40]!r}... has {len(after)} tokens, "
                f"more than the model's context of {self.max_length}"
            )
        # The last token is predicted, never read, so one more than max_length fits.
        seen = (before + after)[-(self.max_length + 1) :]
        return Request(tuple(seen[: -len(after)]), tuple(after))

    def encode_requests(self, texts: Iterable[tuple[str, str]]) -> list[Request]:
        """Encode several (context, continuation) pairs."""
        return [self.encode_request(context, continuation) for context, continuation in texts]

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        check_tokens(tokens, self.vocabulary, self.tokenizer)
        return tokens

    def _split(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if not context:
            after = self._encode(continuation, False)
            if after[:1] == [self.prefix_token]:
                return after[:1], after[1:]
            return [self.prefix_token], after
        stem = context.rstrip()
        tokens = self.encode(context + continuation)
        before = self.encode(stem)
        # A blank context leaves no tokens, unless the tokenizer puts a special token before every text.
        return before or [self.prefix_token], tokens[len(before) :]
