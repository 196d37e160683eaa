"""Texts as tokens: in windows, and with the tokens that stand before or after them."""

from typing import Any

import torch
from torch import Tensor

from diffquant.errors import DiffQuantError, UsageError
from diffquant.support.spelling import spelled
from diffquant.text.prompts import check_tokens

DEFAULT_MAX_LENGTH = 2048
# A text's end may change the tokens before it, but never this many.
_TOKENS_OF_AN_END = 256
# What transformers' tokenizers say when nobody told them.
_UNSET_LENGTH = int(1e30)


def token_windows(model: Any, tokenizer: Any, text: str, window: int, tokens: int | None = None) -> Tensor:
    """The text in windows that do not overlap, as perplexity encodes it; what fills no window is left out.

    Args:
        window: number of tokens of a window, at most the model's context.
        tokens: largest number of tokens that are read of the text; all by default.

    Returns:
        ids [N, window].

    Raises:
        UsageError: the window does not fit the model, the text does not fill one, or a token is not in the vocabulary.
    """
    check_window(window, model.config, tokenizer)
    if tokens is not None and tokens < window:
        raise UsageError(f"{tokens} tokens hold no window of {window}; read more tokens, or in shorter windows")
    ids = encode_text(tokenizer, text, model.config.vocab_size, model.device, tokens)
    count = len(ids) // window
    if not count:
        raise UsageError(
            f"the text has {len(ids)} tokens, fewer than one window of {window}; give a longer text, or shorter windows"
        )
    return ids[: count * window].view(count, window)


def check_window(window: int, config: Any, tokenizer: Any) -> None:
    """Refuse windows that hold no prediction, or more tokens than a model sees at once.

    Raises:
        UsageError: the window is such.
    """
    context = max_length(config, tokenizer)
    if not 2 <= window <= context:
        raise UsageError(
            f"window {window} must be between 2 and the model's context, {context} tokens; give {spelled('window')}"
        )


def prefix_token(tokenizer: Any) -> int:
    """The token that stands before a text without context: BOS, or EOS where there is none.

    Raises:
        DiffQuantError: the tokenizer has neither.
    """
    token = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if token is None:
        raise DiffQuantError("the tokenizer has neither a BOS nor an EOS token; set one in tokenizer_config.json")
    return int(token)


def end_token(tokenizer: Any) -> int:
    """The token that ends a text: EOS, or BOS where there is none.

    Raises:
        DiffQuantError: the tokenizer has neither.
    """
    return prefix_token(tokenizer) if tokenizer.eos_token_id is None else int(tokenizer.eos_token_id)


def max_length(config: Any, tokenizer: Any) -> int:
    """The number of tokens that a model sees at once, as its config says, else its tokenizer, else 2048."""
    for name in ("n_positions", "max_position_embeddings", "n_ctx"):
        if getattr(config, name, None) is not None:
            return int(getattr(config, name))
    length = getattr(tokenizer, "model_max_length", None)
    return DEFAULT_MAX_LENGTH if length is None or length >= _UNSET_LENGTH else int(length)


def encode_text(tokenizer: Any, text: str, vocabulary: int, device: torch.device, tokens: int | None = None) -> Tensor:
    """Token ids [N + 1]: the prefix token, then the N of the text; the first `tokens` of them if that is given.

    Args:
        vocabulary: number of tokens that the model knows.

    Raises:
        UsageError: the text has no two tokens, or one that the model does not know.
    """
    ids = _encoded(tokenizer, text) if tokens is None else _first_encoded(tokenizer, text, tokens)
    if len(ids) < 2:
        raise UsageError(f"the text has {len(ids)} tokens; perplexity needs two or more")
    ids = [prefix_token(tokenizer), *ids][:tokens]
    check_tokens(ids, vocabulary, tokenizer)
    return torch.tensor(ids, device=device)


def _first_encoded(tokenizer: Any, text: str, tokens: int) -> list[int]:
    """At least `tokens` of a text's tokens, or all of them, without encoding a long text whole."""
    wanted = tokens + _TOKENS_OF_AN_END
    length = 8 * wanted
    ids = _encoded(tokenizer, text[:length])
    while len(ids) < wanted and length < len(text):
        length *= 2
        ids = _encoded(tokenizer, text[:length])
    return ids


def _encoded(tokenizer: Any, text: str) -> list[int]:
    # Quiet about a text longer than the context, which no pass sees as one.
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return ids
