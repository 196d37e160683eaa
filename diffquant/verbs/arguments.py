"""Arguments of the verbs: a list may be a text with commas, as on the command line, or a sequence."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from diffquant.errors import UsageError
from diffquant.support.comma_lists import split_list, split_numbers
from diffquant.support.plain_data import is_text
from diffquant.support.suggestion import did_you_mean

if TYPE_CHECKING:
    from diffquant.evals.task import TaskOption


def texts(given: str | Sequence[str]) -> tuple[str, ...]:
    """The parts of "logits,kv" or of ["logits", "kv"]."""
    return split_list(given) if isinstance(given, str) else tuple(given)


def numbers(name: str, given: str | int | Sequence[int], example: str = "16,8,6,4") -> tuple[int, ...]:
    """The numbers of "8,6,4", of [8, 6, 4], or of 8 alone.

    Raises:
        UsageError: a part of the text is no number; `name` says of which argument.
    """
    if isinstance(given, str):
        return split_numbers(name, given, example)
    return (given,) if isinstance(given, int) else tuple(given)


def widths(given: str | int | Sequence[int | str]) -> tuple[int | str, ...]:
    """The widths of "8,nvfp4" or of [8, "nvfp4"]: bits as numbers, other formats by name."""
    parts = split_list(given) if isinstance(given, str) else (given,) if isinstance(given, int) else tuple(given)
    return tuple(int(part) if isinstance(part, str) and part.isdecimal() else part for part in parts)


def paths(given: Path | str | Sequence[Path | str]) -> tuple[Path, ...]:
    """One path, or several; none for ()."""
    return (Path(given),) if isinstance(given, Path | str) else tuple(Path(path) for path in given)


def path_or_none(given: Path | str | None) -> Path | None:
    """A path that may be left out."""
    return None if given is None else Path(given)


def task_values(given: Mapping[str, object], verb: Callable[..., object]) -> dict[str, object]:
    """Tasks' options as tasks take them, of such that may be text: lengths="64,128", text="books.txt".

    Raises:
        UsageError: neither a task nor the verb has such an option.
    """
    from diffquant.evals.tasks import task_options

    options = {option.name: option for option in task_options()}
    for name in given.keys() - options.keys():
        known = [*inspect.signature(verb).parameters, *options]
        raise UsageError(f"no task has an option {name}{did_you_mean(name, known)}")
    return {name: _read(options[name], value) for name, value in given.items()}


def _read(option: "TaskOption[object]", value: object) -> object:
    if isinstance(value, str | PathLike) and not is_text(str(value)):
        raise UsageError(f"{option.name} is {str(value)!r}, which is not UTF-8; rename the file")
    if isinstance(value, str):
        try:
            value = option.kind(value)
        except ValueError as error:
            raise UsageError(f"{option.name} takes a number, not {value!r}") from error
    is_written = option.read is not None and isinstance(value, option.kind)
    return option.read(value) if is_written else value  # type: ignore[arg-type,misc]  # of what it reads
