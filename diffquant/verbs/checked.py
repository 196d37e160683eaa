"""What Python gives a verb, checked before the verb begins: the command line's own values are of the right types."""

import inspect
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from os import PathLike
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from diffquant.errors import UsageError
from diffquant.support.plain_data import is_text
from diffquant.support.suggestion import did_you_mean
from diffquant.verbs.kinds import Kind, kind_of

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")
# Types by the names that annotations have for them.
_PATHS = {"PathText", "Path"}


def checked(verb: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """The verb, which raises UsageError where an argument is unknown, missing, or of a type that it does not take."""
    signature = inspect.signature(verb)

    @wraps(verb)
    def run(*args: _Given.args, **kwargs: _Given.kwargs) -> _Made:
        known = signature.parameters
        if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values()):
            for name in kwargs.keys() - known.keys():
                raise UsageError(f"{verb.__name__} has no parameter {name}{did_you_mean(name, list(known))}")
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise UsageError(f"{verb.__name__}: {error}") from error
        for name, value in given.items():
            kind, default = kind_of(known[name].annotation), known[name].default
            if kind is not None and value is not default:
                _check(verb.__name__, name, kind, _names_in(known[name].annotation), value)
        return verb(*args, **kwargs)

    return run


def _check(verb: str, name: str, kind: Kind, takes: set[str], value: object) -> None:
    if kind.type in (int, float):
        _check_number(name, kind, value)
    elif kind.type is Path and "RecipeLike" not in takes:
        several = kind.repeats and isinstance(value, Sequence) and not isinstance(value, str | bytes)
        for each in value if several else (value,):  # type: ignore[attr-defined]  # it is a sequence where it has several
            if not (isinstance(each, str | PathLike) or _is_of(each, takes)):
                raise UsageError(_no_path(verb, name, kind, each))
            _check_name(name, each)
    elif kind.type is str and not (_is_of(value, takes) or (takes & _PATHS and isinstance(value, PathLike))):
        raise UsageError(f"{name} is {_of(value)}; it takes {'a text' if takes == {'str'} else 'a text or a list'}")
    else:
        _check_name(name, value)


def _check_name(name: str, value: object) -> None:
    """Check that a path is text: records and pages name it, and they are UTF-8."""
    if isinstance(value, str | PathLike) and not is_text(str(value)):
        raise UsageError(f"{name} is {str(value)!r}, which is not UTF-8; rename the file or folder")


def _check_number(name: str, kind: Kind, value: object) -> None:
    wanted, called = (numbers.Integral, "a whole number") if kind.type is int else (numbers.Real, "a number")
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise UsageError(f"{name} is {_of(value)}; it takes {called}")
    # As it is for typer, a number that is none is within no bounds.
    if kind.least is not None and not value >= kind.least:  # type: ignore[operator]
        raise UsageError(f"{name} must be {kind.least:g} or more, got {value}")
    if kind.most is not None and value > kind.most:  # type: ignore[operator]
        raise UsageError(f"{name} must be {kind.most:g} or less, got {value}")


def _no_path(verb: str, name: str, kind: Kind, value: object) -> str:
    if not kind.by_place or kind.word not in ("MODEL", "MODELS"):
        return f"{name} is {_of(value)}; it takes a path"
    if value is None or isinstance(value, numbers.Number | bytes):
        return f"{name} is {_of(value)}; it takes a checkpoint's folder, a .gguf file or ORG/NAME"
    return (
        f"{verb} reads a checkpoint from disk, not a {type(value).__name__} in memory: give its folder; "
        "model.save_pretrained(folder) writes one"
    )


def _names_in(annotation: object) -> set[str]:
    """Names of the types that an annotation takes, also of such as only checkers of types import."""
    names = set(re.findall(r"\w+", re.sub(r"Kind\(.*", "", str(annotation))))
    return names - {"typing", "Annotated", "ForwardRef", "None", "pathlib", "collections", "abc"}


def _is_of(value: object, takes: set[str]) -> bool:
    """Whether a value is of one of the named types; a text is no sequence here."""
    return (
        not takes.isdisjoint(each.__name__ for each in type(value).__mro__ if each is not object)
        or ("float" in takes and isinstance(value, numbers.Real) and not isinstance(value, bool))
        or ("Sequence" in takes and isinstance(value, Sequence) and not isinstance(value, str | bytes))
        or ("Mapping" in takes and isinstance(value, Mapping))
        or "Any" in takes
    )


def _of(value: Any) -> str:
    """A value in a message, by its type where it is long."""
    text = repr(value)
    return text if len(text) < 40 else f"a {type(value).__name__}"
