"""Names parameters for messages, parses lists, suggests known names, and imports a package's modules."""

import difflib
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import TypeVar

from diffquant.errors import UsageError

_on_command_line = False


def option_name(parameter: str, value: object = None) -> str:
    """Name a parameter, with its value if given: "overwrite=True", or "--overwrite" on the command line.

    Args:
        value: value to suggest; False becomes the negative option, such as "--no-cache".
    """
    if not _on_command_line:
        return parameter if value is None else f"{parameter}={value!r}"
    words = parameter.replace("_", "-")
    if value is False:
        return f"--no-{words}"
    return f"--{words}" if value is None or value is True else f"--{words} {value}"


def replace_numbers(name: str) -> str:
    """Replace the numbers of layers and experts in a tensor's name by "*", as patterns of names have them."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


@contextmanager
def use_option_names() -> Iterator[None]:
    """Name parameters as command-line options inside this context."""
    global _on_command_line  # noqa: PLW0603  # the process has one user; threads see it too, as a context they would not
    before, _on_command_line = _on_command_line, True
    try:
        yield
    finally:
        _on_command_line = before


def split_list(text: str) -> tuple[str, ...]:
    """Split a text at commas, dropping blank parts."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def split_numbers(parameter: str, text: str, example: str) -> tuple[int, ...]:
    """Parse the numbers in a parameter's text; 4K is 4096.

    Raises:
        UsageError: a part is not a number; the message shows the example.
    """
    unread = [part for part in split_list(text) if not re.fullmatch("[0-9]{1,9}K?", part)]
    if unread:
        raise UsageError(
            f"cannot read {option_name(parameter)} {text[:80]!r}: {unread[0][:40]!r} is not a whole number below a "
            f"billion; expected for example {example}"
        )
    return tuple(int(part.removesuffix("K")) * (1024 if part.endswith("K") else 1) for part in split_list(text))


NAMED = 5
_Item = TypeVar("_Item", bound=Hashable)


def first_few(items: Iterable[object], between: str = "; ", most: int = NAMED) -> str:
    """Join the first `most` items, and the number of all others, into a text such as "a; b; and 7 more"."""
    texts = list(map(str, items))
    more = [f"and {len(texts) - most} more"] if len(texts) > most else []
    return between.join(texts[:most] + more)


def find_duplicates(items: Iterable[_Item]) -> list[_Item]:
    """Return the items that occur more than once, in the order of their first occurrence."""
    return [item for item, times in Counter(items).items() if times > 1]


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Return the end of a message about an unknown name, such as "; did you mean 'int4'?".

    If no known name is similar, it lists all known names.
    """
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f"; did you mean {close[0]!r}?" if close else f"; choose from {', '.join(known)}"


def import_all(package: ModuleType) -> None:
    """Import every module of a package, in alphabetical order, so that each registers what it defines."""
    for module in sorted(info.name for info in iter_modules(package.__path__)):
        import_module(f"{package.__name__}.{module}")
