"""Encodes texts as tokens: in windows, and with the special tokens before or after them."""

from typing import Any

import torch
from torch import Tensor

from diffquant.checkpoints.texts import check_tokens
from diffquant.errors import DiffQuantError, UsageError
from diffquant.support.names import option_name

DEFAULT_MAX_LENGTH = 2048
# Where a text is cut may change the tokens before the cut, but never this many.
_TOKENS_OF_AN_END = 256
# The maximum length of transformers' tokenizers if none was set.
_UNSET_LENGTH = int(1e30)


def encode_windows(model: Any, tokenizer: Any, text: str, window: int, tokens: int | None = None) -> Tensor:
    """Encode a text and cut it into windows that do not overlap, as for perplexity; drop an incomplete last window.

    Args:
        window: number of tokens of a window, at most the model's context.
        tokens: largest number of tokens of the text to read; all by default.

    Returns:
        ids [N, window].

    Raises:
        UsageError: the window does not fit the model, the text does not fill one, or a token is not in the vocabulary.
    """
    check_window(window, model.config, tokenizer, tokens)
    ids = encode_text(tokenizer, text, model.config.vocab_size, model.device, tokens)
    return cut_windows(ids, window, "the text")


def cut_windows(ids: Tensor, window: int, name: str) -> Tensor:
    """Cut ids [T] into windows [N, window] that do not overlap; drop an incomplete last window.

    Args:
        name: name of the text, for the message.

    Raises:
        UsageError: there are fewer ids than a window has.
    """
    count = len(ids) // window
    if not count:
        raise UsageError(
            f"{name} has {len(ids)} tokens, fewer than one window of {window}; give a longer text, or shorter windows"
        )
    return ids[: count * window].view(count, window)


def check_window(window: int, config: Any, tokenizer: Any, tokens: int | None = None) -> None:
    """Check that a window has at least two tokens, fits into a model's context, and is filled by `tokens`, if given.

    Raises:
        UsageError: it is too short or too long.
    """
    context = max_length(config, tokenizer)
    if not 2 <= window <= context:
        raise UsageError(
            f"window {window} must be between 2 and the model's context, {context} tokens; give {option_name('window')}"
        )
    if tokens is not None and tokens < window:
        raise UsageError(f"{tokens} tokens do not fill a window of {window}; read more tokens, or use shorter windows")


def prefix_token(tokenizer: Any) -> int:
    """Return the token that starts a text without context: BOS, or EOS if there is no BOS.

    Raises:
        DiffQuantError: the tokenizer has neither.
    """
    token = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if token is None:
        raise DiffQuantError("the tokenizer has neither a BOS nor an EOS token; set one in tokenizer_config.json")
    return int(token)


def end_token(tokenizer: Any) -> int:
    """Return the token that ends a text: EOS, or BOS if there is no EOS.

    Raises:
        DiffQuantError: the tokenizer has neither.
    """
    return prefix_token(tokenizer) if tokenizer.eos_token_id is None else int(tokenizer.eos_token_id)


def max_length(config: Any, tokenizer: Any) -> int:
    """Return the model's context length from its config, else from its tokenizer, else 2048."""
    for name in ("n_positions", "max_position_embeddings", "n_ctx"):
        if getattr(config, name, None) is not None:
            return int(getattr(config, name))
    length = getattr(tokenizer, "model_max_length", None)
    return DEFAULT_MAX_LENGTH if length is None or length >= _UNSET_LENGTH else int(length)


def encode_text(tokenizer: Any, text: str, vocabulary: int, device: torch.device, tokens: int | None = None) -> Tensor:
    """Encode a text as ids [N]: the prefix token, see `prefix_token`, then the text's tokens.

    Args:
        vocabulary: size of the model's vocabulary in tokens.
        tokens: number of ids to return at most; all by default.

    Raises:
        UsageError: the text has fewer than two tokens, or one that is not in the vocabulary.
    """
    ids = _encode(tokenizer, text) if tokens is None else encode_first_tokens(tokenizer, text, tokens)
    if len(ids) < 2:
        raise UsageError(f"the text has {len(ids)} tokens; perplexity needs two or more")
    ids = [prefix_token(tokenizer), *ids][:tokens]
    check_tokens(ids, vocabulary, tokenizer)
    return torch.tensor(ids, device=device)


def encode_first_tokens(tokenizer: Any, text: str, tokens: int) -> list[int]:
    """Return at least the first `tokens` ids of a text, or all if it has fewer, without encoding a long text whole."""
    wanted = tokens + _TOKENS_OF_AN_END
    length = 8 * wanted
    ids = _encode(tokenizer, text[:length])
    while len(ids) < wanted and length < len(text):
        length *= 2
        ids = _encode(tokenizer, text[:length])
    return ids


def _encode(tokenizer: Any, text: str) -> list[int]:
    # No warning about a text longer than the context, since no pass reads all of it.
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return ids
