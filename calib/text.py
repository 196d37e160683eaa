"""A text as windows of tokens."""

from typing import Any

from torch import Tensor

from diffquant.errors import UsageError
from diffquant.evals.encoding import max_length
from diffquant.evals.perplexity import encode


def token_windows(model: Any, tokenizer: Any, text: str, window: int, tokens: int | None = None) -> Tensor:
    """The text in windows that do not overlap, as perplexity encodes it; what fills no window is left out.

    Args:
        window: tokens of each, at most the model's context.
        tokens: of the text, at most; all by default.

    Returns:
        ids [N, window].

    Raises:
        UsageError: the window does not fit the model, or the text holds no whole one.
    """
    if not 2 <= window <= max_length(model.config, tokenizer):
        raise UsageError(
            f"window {window} must be between 2 and the model's context, {max_length(model.config, tokenizer)} tokens; "
            "give --window"
        )
    if tokens is not None and tokens < window:
        raise UsageError(f"{tokens} tokens hold no window of {window}; read more tokens, or in shorter windows")
    ids = encode(model, tokenizer, text)[:tokens]
    count = len(ids) // window
    if not count:
        raise UsageError(
            f"the text has {len(ids)} tokens, fewer than one window of {window}; give a longer text, or shorter windows"
        )
    if int(ids.max()) >= model.config.vocab_size:
        raise UsageError(f"the tokenizer gives token {int(ids.max())}; the model knows {model.config.vocab_size}")
    return ids[: count * window].view(count, window)
