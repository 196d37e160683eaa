"""Encodes text as tokens, split between context and continuation exactly as lm-eval splits it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diffquant.errors import DiffQuantError
from diffquant.text.prompts import check_tokens
from diffquant.text.tokens import prefix_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Request:
    """A continuation to score after a context, as token ids; neither is empty."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


class RequestEncoder:
    """Encodes a context and its continuation as lm-eval's HFLM does.

    Args:
        tokenizer: a Hugging Face tokenizer.
        max_length: number of tokens the model sees at once; longer requests lose tokens on the left.
        vocabulary: number of tokens that the model knows.

    Source: lm-eval 0.4.13, `TemplateLM._encode_pair`, `HFLM.tok_encode` and `_loglikelihood_tokens`.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", max_length: int, vocabulary: int) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.vocabulary = vocabulary
        self.prefix_token = prefix_token(tokenizer)
        self._prefix_text: str = tokenizer.decode(self.prefix_token)

    def encode(self, text: str) -> list[int]:
        """Tokens of `text`, with the tokenizer's special tokens unless the text already begins with one.

        Raises:
            UsageError: the model does not know one of them.
        """
        return self._encode(text, not text.startswith(self._prefix_text))

    def request(self, context: str, continuation: str) -> Request:
        """Encode one continuation; spaces at the end of the context move to the continuation.

        Raises:
            DiffQuantError: the continuation has no tokens of its own, or more than the model can see, or one that the
                model does not know.
        """
        before, after = self._split(context, continuation)
        if not after:
            raise DiffQuantError(f"continuation {continuation!r} has no tokens after context {context[-40:]!r}")
        if len(after) > self.max_length:
            raise DiffQuantError(
                f"continuation {continuation[:40]!r}... has {len(after)} tokens, "
                f"more than the {self.max_length} the model can see"
            )
        # The last token is predicted, never read, so one more than max_length fits.
        seen = (before + after)[-(self.max_length + 1) :]
        return Request(tuple(seen[: -len(after)]), tuple(after))

    def requests(self, texts: Iterable[tuple[str, str]]) -> list[Request]:
        """Encode several (context, continuation) pairs."""
        return [self.request(context, continuation) for context, continuation in texts]

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
        # Of a blank context nothing is left, and not every tokenizer puts a token of its own before a text.
        return before or [self.prefix_token], tokens[len(before) :]
