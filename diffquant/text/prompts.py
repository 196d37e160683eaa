"""Prompts that can be continued, and their continuation as it comes; what tokens a model knows. No torch."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from diffquant.errors import UsageError

_COLDEST = 1e-30


def check_prompt(prompt: str) -> None:
    """Check that a prompt is text.

    Raises:
        UsageError: it is empty, or holds bytes that are not UTF-8, which Python passes on as halves of characters.
    """
    if not prompt.strip():
        raise UsageError("the prompt is empty")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the prompt is no text in UTF-8, from character {error.start} on; convert it first"
        ) from error


def divisor(temperature: float) -> float:
    """What logits are divided by before a token is drawn.

    Colder than this even float32's closest logits choose the likeliest token, and quotients overflow.
    """
    return max(float(temperature), _COLDEST)


def check_tokens(ids: Sequence[int], vocabulary: int, tokenizer: Any) -> None:
    """Check that a model knows the tokens that its tokenizer makes; everything that makes tokens of a text calls this.

    Args:
        vocabulary: number of rows of the model's embedding.
        tokenizer: what made them.

    Raises:
        UsageError: it does not know one.
    """
    if ids and (token := max(ids)) >= vocabulary:
        spelling = tokenizer.convert_ids_to_tokens(token)
        raise UsageError(
            f"the tokenizer makes token {token} ({spelling!r}) of the text, and the model's embedding has {vocabulary} "
            "rows: give the model its own tokenizer, or resize its embedding"
        )


def room_after(ids: Sequence[int], vocabulary: int, context: int, tokenizer: Any) -> int:
    """Number of tokens that a context has room for behind a prompt.

    Args:
        ids: the prompt's tokens.
        vocabulary: number of tokens that the model knows.
        context: number of tokens that it sees at once.
        tokenizer: what made them.

    Raises:
        UsageError: there is none, or the prompt has no tokens, or one that the model does not know.
    """
    if not ids:
        raise UsageError("the model's tokenizer makes no token of the prompt: it knows none of these characters")
    check_tokens(ids, vocabulary, tokenizer)
    if len(ids) >= context:
        raise UsageError(f"the prompt has {len(ids)} tokens; the model's context ends at {context}")
    return context - len(ids)


def in_pieces(tokens: Iterable[int], decode: Callable[[list[int]], str]) -> Iterator[str]:
    """The text of tokens, as they come; the pieces together are the text of all of them.

    Args:
        decode: function from tokens to their text, of which the first may lose its space.
    """
    # Tokens from one on that has been yielded and has a text, and how many of them have been yielded.
    window: list[int] = []
    known = 0
    for token in tokens:
        window.append(token)
        text = decode(window)
        # A character of several tokens is decoded as a replacement until it is whole.
        if text.endswith("\ufffd"):
            continue
        yield text[len(decode(window[:known])) :]
        if decode(window[known:]):
            del window[:known]
        known = len(window)
    if rest := decode(window)[len(decode(window[:known])) :]:
        yield rest
