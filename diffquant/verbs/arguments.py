"""Arguments of verbs in Python: checked against their kinds, and converted to the types that the work below takes."""

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from numbers import Integral, Number, Real
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from diffquant.errors import UsageError
from diffquant.recipe.targets import TARGETS
from diffquant.support.machine import use_torch_defaults
from diffquant.support.names import did_you_mean, split_list, split_numbers
from diffquant.support.plain_data import is_encodable_text
from diffquant.verbs.kinds import Kind, kind_of

if TYPE_CHECKING:
    from diffquant.measure.task import TaskOption

# Options of other tools, by the argument with the same effect here.
OPTIONS_ELSEWHERE = {
    'recipe={"weights": "4:g32"}': (
        *("bits", "wbits", "w-bits", "q-bits", "group-size", "q-group-size"),
        *("scheme", "quantization", "quant-type", "qtype"),
    ),
    'rounding="gptq"': ("method", "algorithm", "quant-method"),
    'recipe={"kv": 8}': ("kv-cache-dtype", "kv-bits", "cache-type"),
}


_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")
_WHOLE = Kind(int)
# Names of path types in annotations.
_PATHS = {"PathText", "Path"}


def check_arguments(verb: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Wrap a verb so that an unknown, missing or mistyped argument raises UsageError."""
    signature = inspect.signature(verb)

    @wraps(verb)
    def run(*args: _Given.args, **kwargs: _Given.kwargs) -> _Made:
        known = signature.parameters
        unknown = kwargs.keys() - known.keys()
        if unknown and not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values()):
            name = min(unknown)
            raise UsageError(_explain_unknown(verb.__name__, name, kwargs[name], known))
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise UsageError(f"{verb.__name__}: {error}") from error
        for name, value in given.arguments.items():
            kind, default = kind_of(known[name].annotation), known[name].default
            if kind is not None and value is not default:
                _check(verb.__name__, name, kind, _names_in(known[name].annotation), value)
                if kind.is_repeatable and not value and default in (None, inspect.Parameter.empty):
                    raise UsageError(f"{name} is {_of(value)}; give at least one")
                if kind.type in (int, float) and not isinstance(value, int | float):
                    # Neither JSON nor a random generator's seed takes numbers of NumPy.
                    given.arguments[name] = kind.type(value)
        with use_torch_defaults():
            return verb(*given.args, **given.kwargs)

    return run


def _explain_unknown(
    verb: str, name: str, value: object, known: Collection[str], task_options: Collection[str] = ()
) -> str:
    """Return the error for a parameter that neither a verb nor a task has, with what to give instead."""
    if "recipe" in known and name in (*TARGETS, "kv", "residual", "overrides", "like", "preset"):
        entry = value if name == "preset" else {name: value}
        return f"{verb} takes {name} only in the recipe: recipe={entry!r}"
    if task_options:
        return f"no task has an option {name}{did_you_mean(name, [*known, *task_options])}"
    found = (ours for ours, names in OPTIONS_ELSEWHERE.items() if name.replace("_", "-") in names)
    ours = next(found, None) if "recipe" in known else None
    return f"{verb} has no parameter {name}" + (f"; use {ours}" if ours else did_you_mean(name, list(known)))


def _check(verb: str, name: str, kind: Kind, takes: set[str], value: object) -> None:
    if kind.type in (int, float):
        _check_number(name, kind, value)
    elif kind.type is Path and "RecipeLike" not in takes:
        several = kind.is_repeatable and isinstance(value, Sequence) and not isinstance(value, str | bytes)
        for each in value if several else (value,):  # type: ignore[attr-defined]  # it is a sequence where it has several
            if each == "" or not (isinstance(each, str | PathLike) or _is_of(each, takes)):
                raise UsageError(_no_path(verb, name, kind, each))
            _check_name(name, each)
    elif kind.type is str and not (_is_of(value, takes) or (takes & _PATHS and isinstance(value, PathLike))):
        other = " or a list" if "Sequence" in takes else " or a whole number" if "int" in takes else ""
        raise UsageError(f"{name} is {_of(value)}; it must be {'a path' if takes & _PATHS else 'text'}{other}")
    else:
        _check_name(name, value)


def _check_name(name: str, value: object) -> None:
    """Check that a text or path is valid text, because it is written into UTF-8 records and pages."""
    if isinstance(value, str | PathLike) and not is_encodable_text(str(value)):
        raise UsageError(f"{name} is {str(value)!r:.80}, which is not UTF-8; correct it, or rename the file or folder")


def _check_number(name: str, kind: Kind, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral if kind.type is int else Real):
        raise UsageError(f"{name} is {_of(value)}; it must be a {'whole ' * (kind.type is int)}number")
    # Like typer, treat NaN as outside any bounds.
    if kind.least is not None and not value >= kind.least:  # type: ignore[operator]
        raise UsageError(f"{name} must be {kind.least:.15g} or more, got {value}")
    if kind.most is not None and value > kind.most:  # type: ignore[operator]
        raise UsageError(f"{name} must be {kind.most:.15g} or less, got {value}")


def _no_path(verb: str, name: str, kind: Kind, value: object) -> str:
    if not kind.is_positional or kind.placeholder not in ("MODEL", "MODELS"):
        return f"{name} is {_of(value)}; it must be a path"
    if value is None or isinstance(value, str | Number | bytes):
        return f"{name} is {_of(value)}; it must be a checkpoint folder, a .gguf file or ORG/NAME"
    return (
        f"{verb} reads a checkpoint from disk, not a {type(value).__name__} in memory; "
        "write a folder with model.save_pretrained(folder) and give that"
    )


def _names_in(annotation: object) -> set[str]:
    """Return the names of an annotation's types, including those imported only for type checking."""
    names = set(re.findall(r"\w+", re.sub(r"Kind\(.*", "", str(annotation))))
    return names - {"typing", "Annotated", "ForwardRef", "None", "pathlib", "collections", "abc"}


def _is_of(value: object, takes: set[str]) -> bool:
    """Return whether a value has one of the named types; text does not count as a sequence here."""
    return (
        not takes.isdisjoint(each.__name__ for each in type(value).__mro__ if each is not object)
        or ("float" in takes and isinstance(value, Real) and not isinstance(value, bool))
        or ("Sequence" in takes and isinstance(value, Sequence) and not isinstance(value, str | bytes))
        or ("Mapping" in takes and isinstance(value, Mapping))
        or "Any" in takes
    )


def _of(value: Any) -> str:
    """Format a value for a message; a long one only by its type."""
    text = repr(value)
    return text if len(text) < 40 else f"a {type(value).__name__}"


def split_texts(given: str | Sequence[str]) -> tuple[str, ...]:
    """Return a tuple of texts from a text such as "logits,kv" or from a list such as ["logits", "kv"]."""
    return split_list(given) if isinstance(given, str) else tuple(given)


def parse_bits(given: str | int | Sequence[int]) -> tuple[int, ...]:
    """Return bit widths from "8,6,4", from [8, 6, 4], or from 8.

    Raises:
        UsageError: one of them is not a whole number.
    """
    if isinstance(given, str):
        return split_numbers("bits", given, "16,8,6,4")
    numbers = (given,) if isinstance(given, int) else tuple(given)
    for each in numbers:
        _check_number("bits", _WHOLE, each)
    return tuple(map(int, numbers))


def parse_widths(given: str | int | Sequence[int | str]) -> tuple[int | str, ...]:
    """Return widths from "8,nvfp4" or [8, "nvfp4"]: bits as numbers, other formats by name."""
    parts = split_list(given) if isinstance(given, str) else (given,) if isinstance(given, int) else tuple(given)
    return tuple(
        int(part) if isinstance(part, Integral) or (isinstance(part, str) and part.isdecimal()) else part
        for part in parts
    )


def to_paths(given: Path | str | Sequence[Path | str]) -> tuple[Path, ...]:
    """Return a tuple of paths from one path or from a sequence."""
    return (Path(given),) if isinstance(given, Path | str) else tuple(Path(path) for path in given)


def to_path(given: Path | str | None) -> Path | None:
    """Convert to a path, or return None if none is given."""
    return None if given is None else Path(given)


def read_task_options(given: Mapping[str, object], verb: Callable[..., object]) -> dict[str, object]:
    """Convert options of tasks that are given as text, such as lengths="64,128", to the types that tasks use.

    Args:
        given: values of options by name.
        verb: verb that takes the options; an error about an unknown name may suggest one of its parameters.

    Raises:
        UsageError: no task has one of the options.
    """
    from diffquant.measure.tasks import task_options

    options = {option.name: option for option in task_options()}
    if unknown := given.keys() - options.keys():
        name, known = min(unknown), inspect.signature(verb).parameters
        raise UsageError(_explain_unknown(verb.__name__, name, given[name], known, options))
    # None is the default, as for a verb's parameters.
    return {name: _read(options[name], value) for name, value in given.items() if value is not None}


def _read(option: "TaskOption[object]", value: object) -> object:
    if option.kind is Path and not isinstance(value, str | PathLike):
        raise UsageError(f"{option.name} is {_of(value)}; it must be a path")
    _check_name(option.name, value)
    if option.kind is str and option.read is not None and not isinstance(value, str):
        value = ",".join(map(str, value if isinstance(value, Sequence) else (value,)))
    if option.kind is bool and not isinstance(value, bool):
        raise UsageError(f"{option.name} is {_of(value)}; it must be True or False")
    if isinstance(value, str):
        try:
            value = option.kind(value)
        except ValueError as error:
            raise UsageError(f"{option.name} takes a number, not {value!r}") from error
    elif option.kind is int:
        _check_number(option.name, _WHOLE, value)
        value = int(value)  # type: ignore[call-overload]  # it is a whole number
    is_written = option.read is not None and isinstance(value, option.kind)
    return option.read(value) if is_written else value  # type: ignore[arg-type,misc]  # of what it reads
