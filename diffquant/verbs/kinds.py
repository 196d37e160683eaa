"""Kinds of verbs' parameters: what Python may give, and beside it how the command line reads it. No torch here."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

if TYPE_CHECKING:
    import torch

    from diffquant.recipe import RecipeLike
    from diffquant.source.places import DeviceMap as AnyDeviceMap
    from diffquant.source.source import Source


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
        is_needed: whether the command line has to give it although Python may leave it out.
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
    is_needed: bool = False


_PLAIN = {int: Kind(int, "NUMBER"), float: Kind(float, "NUMBER"), bool: Kind(bool)}


def kind_of(annotation: Any) -> Kind | None:
    """How the command line reads a parameter of this type; None for what only Python can give."""
    for kind in get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,):
        for given in (*getattr(kind, "__metadata__", ()), _PLAIN.get(kind)):
            if isinstance(given, Kind):
                return given
    return None


def _task_usages() -> list[str]:
    from diffquant.evals.tasks import task_kinds

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
Preset = Annotated[str, Kind(Literal["int4", "int8", "kv-4bit-best", "paper"], heading=_IN_RECIPE)]
Kernel = Annotated[str, Kind(Literal["sage2", "sage2-int4", "sage3", "fa3-fp8", "modelopt-nvfp4"], heading=_IN_RECIPE)]
Residual = Annotated[int, Kind(int, "TOKENS", heading=_IN_RECIPE)]
Overrides = Annotated[
    Mapping[str, str] | Sequence[str], Kind(str, "PATTERN=SCHEME", repeats=True, former="override", heading=_IN_RECIPE)
]
StoredDtype = Annotated["torch.dtype | str", Kind(Literal["bfloat16", "float16", "float32"], "NAME")]
DeviceMap = Annotated["AnyDeviceMap", Kind(Literal["auto"])]
Push = Annotated[str, Kind(str, "ORG/NAME")]
