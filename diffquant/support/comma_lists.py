"""Comma-separated lists, such as "16,8,4"."""

import re

from diffquant.errors import UsageError
from diffquant.support.spelling import spelled


def split_list(text: str) -> tuple[str, ...]:
    """Split a text at commas, dropping blank parts."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def split_numbers(parameter: str, text: str, example: str) -> tuple[int, ...]:
    """The numbers in a parameter's text; 4K is 4096.

    Raises:
        UsageError: a part is not a number; the message shows the example.
    """
    unread = [part for part in split_list(text) if not re.fullmatch("[0-9]{1,9}K?", part)]
    if unread:
        raise UsageError(
            f"cannot read {spelled(parameter)} {text[:80]!r}: {unread[0][:40]!r} is not a whole number below a "
            f"billion; expected such as {example}"
        )
    return tuple(int(part.removesuffix("K")) * (1024 if part.endswith("K") else 1) for part in split_list(text))
