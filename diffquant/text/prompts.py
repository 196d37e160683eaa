"""Prompts that can be continued, and their continuation as it comes. No torch."""

from collections.abc import Callable, Iterable, Iterator

from diffquant.errors import UsageError


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


def room_after(tokens: int, context: int) -> int:
    """Number of tokens that a context has room for behind a prompt of so many.

    Raises:
        UsageError: there is none, or the prompt has no tokens.
    """
    if not tokens:
        raise UsageError("the model's tokenizer makes no token of the prompt: it knows none of these characters")
    if tokens >= context:
        raise UsageError(f"the prompt has {tokens} tokens; the model's context ends at {context}")
    return context - tokens


def in_pieces(tokens: Iterable[int], decode: Callable[[list[int]], str]) -> Iterator[str]:
    """The text of tokens, as they come; the pieces together are the text of all of them.

    Args:
        decode: function from tokens to their text. It is given all so far: the first of a text may lose its space.
    """
    text = yielded = ""
    seen: list[int] = []
    for token in tokens:
        seen.append(token)
        text = decode(seen)
        # A character of several tokens is decoded as a replacement until it is whole.
        if not text.endswith("\ufffd"):
            yield text[len(yielded) :]
            yielded = text
    if text != yielded:
        yield text[len(yielded) :]
