"""Spells parameters as the user does: keywords in Python, options on the command line.

A verb is one function for both, so messages name parameters through `spelled`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

_on_command_line = False


def spelled(parameter: str, value: object = None) -> str:
    """A parameter and its value, if given: "overwrite=True", or "--overwrite" on the command line.

    Args:
        value: value to suggest; False becomes the negative option, such as "--no-cache".
    """
    if not _on_command_line:
        return parameter if value is None else f"{parameter}={value!r}"
    words = parameter.replace("_", "-")
    if value is False:
        return f"--no-{words}"
    return f"--{words}" if value is None or value is True else f"--{words} {value}"


@contextmanager
def command_line() -> Iterator[None]:
    """Spell parameters as command-line options inside this context."""
    global _on_command_line  # noqa: PLW0603  # the process has one user; threads see it too, as a context they would not
    before, _on_command_line = _on_command_line, True
    try:
        yield
    finally:
        _on_command_line = before
