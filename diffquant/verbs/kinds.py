"""Kinds of verbs' parameters: what Python may give, how the command line reads it, and the check of both. No torch."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from numbers import Integral, Number, Real
from os import PathLike
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

from diffquant.errors import UsageError
from diffquant.recipe.targets import TARGETS
from diffquant.support.names import did_you_mean, split_list, split_numbers
from diffquant.support.plain_data import is_text

if TYPE_CHECKING:
    import torch

    from diffquant.checkpoints.places import DeviceMap as AnyDeviceMap
    from diffquant.checkpoints.source import Source
    from diffquant.measure.task import TaskOption
    from diffquant.recipe import RecipeLike


@dataclass(frozen=True)
class Kind:
    """How the command line reads a parameter. Numbers and flags need none; what has neither only Python can give.

    Attributes:
        type: type of a value: `str`, `Path`, `int`, `float`, or a `Literal` of the values there are.
        word: word for a value in the help; the values themselves by default.
        by_place: whether it is known by its place, not by its name.
        repeats: whether it may be given several times.
        short: letter for it, such as "-o".
        former: name that it had, and still goes by.
        least, most: bounds of a number.
        known: function that says which values there are, for the end of its help.
        heading: heading that it stands under in the help.
        or_stdin: whether - stands for what standard input says.
    """

    type: Any
    word: str | None = None
    by_place: bool = False
    repeats: bool = False
    short: str = ""
    former: str = ""
    least: float | None = None
    most: float | None = None
    known: Callable[[], Iterable[str]] | None = None
    heading: str = "Options"
    or_stdin: bool = False


_PLAIN = {int: Kind(int, "NUMBER"), float: Kind(float, "NUMBER"), bool: Kind(bool)}


def kind_of(annotation: Any) -> Kind | None:
    """Return how the command line reads a parameter of this type, or None if only Python can give it."""
    for kind in get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,):
        for given in (*getattr(kind, "__metadata__", ()), _PLAIN.get(kind)):
            if isinstance(given, Kind):
                return given
    return None


def _task_usages() -> list[str]:
    from diffquant.measure.tasks import task_kinds

    return [kind.usage for kind in task_kinds()]


PathText = Path | str
Model = Annotated["PathText | Source", Kind(Path, "MODEL", by_place=True)]
PathModel = Annotated[PathText, Kind(Path, "MODEL", by_place=True)]
Models = Annotated[PathText | Sequence[PathText], Kind(Path, "MODELS", by_place=True, repeats=True)]
Exported = Annotated[PathText, Kind(Path, "FOLDER", by_place=True)]
NewFolder = Annotated[PathText, Kind(Path, "FOLDER", short="-o")]
NewFile = Annotated[PathText, Kind(Path, "FILE", short="-o")]
Folder = Annotated[PathText, Kind(Path, "FOLDER")]
File = Annotated[PathText, Kind(Path, "FILE")]
Texts = Annotated[PathText | Sequence[PathText], Kind(Path, "SOURCE", repeats=True, former="dataset")]
Files = Annotated[PathText | Sequence[PathText], Kind(Path, "FILE", repeats=True)]

Name = Annotated[str, Kind(str, "NAME")]
Prompt = Annotated[str, Kind(str, "TEXT", or_stdin=True)]
Names = Annotated[str | Sequence[str], Kind(str, "LIST")]
Numbers = Annotated[str | int | Sequence[int], Kind(str, "LIST")]
Widths = Annotated[str | int | Sequence[int | str], Kind(str, "LIST")]
Targets = Annotated[str | Sequence[str], Kind(str, "LIST", former="target")]
Tasks = Annotated[str | Sequence[str], Kind(str, "LIST", former="task", known=_task_usages)]
Count = Annotated[int, Kind(int, "NUMBER", least=1)]
Tokens = Annotated[int, Kind(int, "NUMBER", least=2)]
# ONNX Runtime starts as many as it is told to, whatever memory they take.
Threads = Annotated[int, Kind(int, "NUMBER", least=0, most=1024)]
Seed = Annotated[int, Kind(int, "NUMBER", least=0, most=2**32 - 1)]
Temperature = Annotated[float, Kind(float, "NUMBER", least=0.0)]
Tolerance = Annotated[float, Kind(float, "NUMBER", least=0.0)]

_IN_RECIPE = "Options of what is quantized"
Scheme = Annotated[str | int, Kind(str, "SCHEME", heading=_IN_RECIPE)]
RecipeFile = Annotated["RecipeLike", Kind(Path, "FILE", heading=_IN_RECIPE)]
Preset = Annotated[
    str, Kind(Literal["int4", "int8", "w8a8", "fp8", "w4a8", "kv-4bit-best", "paper"], heading=_IN_RECIPE)
]
Kernel = Annotated[str, Kind(Literal["sage2", "sage2-int4", "sage3", "fa3-fp8", "modelopt-nvfp4"], heading=_IN_RECIPE)]
Residual = Annotated[int, Kind(int, "TOKENS", heading=_IN_RECIPE)]
Overrides = Annotated[
    Mapping[str, str] | Sequence[str], Kind(str, "PATTERN=SCHEME", repeats=True, former="override", heading=_IN_RECIPE)
]
StoredDtype = Annotated["torch.dtype | str", Kind(Literal["bfloat16", "float16", "float32"], "NAME")]
DeviceMap = Annotated["AnyDeviceMap", Kind(Literal["auto"])]
Push = Annotated[str, Kind(str, "ORG/NAME")]


_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")
# Types by the names that annotations have for them.
_PATHS = {"PathText", "Path"}


def check_arguments(verb: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Wrap a verb so that an unknown, missing or mistyped argument raises UsageError."""
    signature = inspect.signature(verb)

    @wraps(verb)
    def run(*args: _Given.args, **kwargs: _Given.kwargs) -> _Made:
        known = signature.parameters
        if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values()):
            for name in kwargs.keys() - known.keys():
                if "recipe" in known and name in (*TARGETS, "kv", "residual", "overrides", "like", "preset"):
                    entry = kwargs[name] if name == "preset" else {name: kwargs[name]}
                    raise UsageError(f"{verb.__name__} takes {name} in its recipe: recipe={entry!r}")
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
    if isinstance(value, bool) or not isinstance(value, Integral if kind.type is int else Real):
        raise UsageError(f"{name} is {_of(value)}; it takes a {'whole ' * (kind.type is int)}number")
    # As it is for typer, a number that is none is within no bounds.
    if kind.least is not None and not value >= kind.least:  # type: ignore[operator]
        raise UsageError(f"{name} must be {kind.least:g} or more, got {value}")
    if kind.most is not None and value > kind.most:  # type: ignore[operator]
        raise UsageError(f"{name} must be {kind.most:g} or less, got {value}")


def _no_path(verb: str, name: str, kind: Kind, value: object) -> str:
    if not kind.by_place or kind.word not in ("MODEL", "MODELS"):
        return f"{name} is {_of(value)}; it takes a path"
    if value is None or isinstance(value, Number | bytes):
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
    """Return whether a value has one of the named types; a text is not a sequence here."""
    return (
        not takes.isdisjoint(each.__name__ for each in type(value).__mro__ if each is not object)
        or ("float" in takes and isinstance(value, Real) and not isinstance(value, bool))
        or ("Sequence" in takes and isinstance(value, Sequence) and not isinstance(value, str | bytes))
        or ("Mapping" in takes and isinstance(value, Mapping))
        or "Any" in takes
    )


def _of(value: Any) -> str:
    """Return a value in a message, by its type where it is long."""
    text = repr(value)
    return text if len(text) < 40 else f"a {type(value).__name__}"


def texts(given: str | Sequence[str]) -> tuple[str, ...]:
    """Return the parts of "logits,kv" or of ["logits", "kv"]."""
    return split_list(given) if isinstance(given, str) else tuple(given)


def numbers(name: str, given: str | int | Sequence[int], example: str = "16,8,6,4") -> tuple[int, ...]:
    """Return the numbers of "8,6,4", of [8, 6, 4], or of 8 alone.

    Raises:
        UsageError: a part of the text is no number; `name` says of which argument.
    """
    if isinstance(given, str):
        return split_numbers(name, given, example)
    return (given,) if isinstance(given, int) else tuple(given)


def widths(given: str | int | Sequence[int | str]) -> tuple[int | str, ...]:
    """Return the widths of "8,nvfp4" or of [8, "nvfp4"]: bits as numbers, other formats by name."""
    parts = split_list(given) if isinstance(given, str) else (given,) if isinstance(given, int) else tuple(given)
    return tuple(int(part) if isinstance(part, str) and part.isdecimal() else part for part in parts)


def paths(given: Path | str | Sequence[Path | str]) -> tuple[Path, ...]:
    """One path, or several; none for ()."""
    return (Path(given),) if isinstance(given, Path | str) else tuple(Path(path) for path in given)


def path_or_none(given: Path | str | None) -> Path | None:
    """Return a path that may be left out."""
    return None if given is None else Path(given)


def task_values(given: Mapping[str, object], verb: Callable[..., object]) -> dict[str, object]:
    """Tasks' options as tasks take them, of such that may be text: lengths="64,128", text="books.txt".

    Raises:
        UsageError: neither a task nor the verb has such an option.
    """
    from diffquant.measure.tasks import task_options

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
