"""What the verbs take: a list may be a text with commas, as on the command line, or a sequence."""

from collections.abc import Sequence
from pathlib import Path

from diffquant.support.comma_lists import split_list, split_numbers


def texts(given: str | Sequence[str]) -> tuple[str, ...]:
    """The parts of "logits,kv" or of ["logits", "kv"]."""
    return split_list(given) if isinstance(given, str) else tuple(given)


def numbers(name: str, given: str | Sequence[int]) -> tuple[int, ...]:
    """The numbers of "8,6,4" or of [8, 6, 4].

    Raises:
        UsageError: a part of the text is no number; `name` says of which argument.
    """
    return split_numbers(name, given, "16,8,6,4") if isinstance(given, str) else tuple(given)


def paths(given: Path | str | Sequence[Path | str]) -> tuple[Path, ...]:
    """One path, or several."""
    return (Path(given),) if isinstance(given, Path | str) else tuple(Path(path) for path in given)


def path_or_none(given: Path | str | None) -> Path | None:
    """A path that may be left out."""
    return None if given is None else Path(given)
