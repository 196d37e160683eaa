"""Parameter types of verbs, and how the command line reads a value of each. Imports no torch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from diffquant.checkpoints.location import check_location
from diffquant.onnx.files import check_exported

if TYPE_CHECKING:
    import torch

    from diffquant.checkpoints.places import DeviceMap as AnyDeviceMap
    from diffquant.checkpoints.source import Source
    from diffquant.recipe import RecipeLike


@dataclass(frozen=True)
class Kind:
    """How the command line reads a parameter.

    Parameters annotated with `int`, `float` or `bool` have a default `Kind`. Any other parameter without a `Kind`
    exists only in Python.

    Attributes:
        type: type of a value: `str`, `Path`, `int`, `float`, or a `Literal` of the allowed values.
        placeholder: word for a value in the help, such as FILE; by default the allowed values.
        is_positional: whether it is a positional argument.
        is_repeatable: whether the option may be repeated.
        short: short form, such as "-o".
        former_name: former name of the option, which still works.
        least, most: smallest and largest allowed number.
        list_values: function that lists the possible values, which the help then shows.
        heading: heading of the help under which it is listed.
        accepts_stdin: whether the value - means to read standard input.
        check: check of a value that the command line makes before it imports torch.
    """

    type: Any
    placeholder: str | None = None
    is_positional: bool = False
    is_repeatable: bool = False
    short: str = ""
    former_name: str = ""
    least: float | None = None
    most: float | None = None
    list_values: Callable[[], Iterable[str]] | None = None
    heading: str = "Options"
    accepts_stdin: bool = False
    check: Callable[[Path], None] | None = None


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
MODEL = Kind(Path, "MODEL", is_positional=True, check=check_location)
Model = Annotated["PathText | Source", MODEL]
PathModel = Annotated[PathText, MODEL]
Models = Annotated[PathText | Sequence[PathText], replace(MODEL, placeholder="MODELS", is_repeatable=True)]
Exported = Annotated[PathText, Kind(Path, "FOLDER", is_positional=True, check=check_exported)]
NewFolder = Annotated[PathText, Kind(Path, "FOLDER", short="-o")]
NewFile = Annotated[PathText, Kind(Path, "FILE", short="-o")]
Folder = Annotated[PathText, Kind(Path, "FOLDER")]
File = Annotated[PathText, Kind(Path, "FILE")]
Texts = Annotated[PathText | Sequence[PathText], Kind(Path, "SOURCE", is_repeatable=True, former_name="dataset")]
Files = Annotated[PathText | Sequence[PathText], Kind(Path, "FILE", is_repeatable=True)]

Name = Annotated[str, Kind(str, "NAME")]
Prompt = Annotated[str, Kind(str, "TEXT", accepts_stdin=True)]
Address = Annotated[str, Kind(str, "ADDRESS")]
Names = Annotated[str | Sequence[str], Kind(str, "LIST")]
Numbers = Annotated[str | int | Sequence[int], Kind(str, "LIST")]
Widths = Annotated[str | int | Sequence[int | str], Kind(str, "LIST")]
Targets = Annotated[str | Sequence[str], Kind(str, "LIST", former_name="target")]
Tasks = Annotated[str | Sequence[str], Kind(str, "LIST", former_name="task", list_values=_task_usages)]
Context = Annotated[int, Kind(int, "TOKENS", least=1)]
Count = Annotated[int, Kind(int, "NUMBER", least=1)]
Tokens = Annotated[int, Kind(int, "NUMBER", least=2)]
# ONNX Runtime starts any requested number of threads, however much memory they take.
Threads = Annotated[int, Kind(int, "NUMBER", least=0, most=1024)]
Seed = Annotated[int, Kind(int, "NUMBER", least=0, most=2**32 - 1)]
Temperature = Annotated[float, Kind(float, "NUMBER", least=0.0)]
Tolerance = Annotated[float, Kind(float, "NUMBER", least=0.0)]

_IN_RECIPE = "Quantization options"
Scheme = Annotated[str | int, Kind(str, "SCHEME", heading=_IN_RECIPE)]
RecipeFile = Annotated["RecipeLike", Kind(Path, "FILE", heading=_IN_RECIPE)]
Preset = Annotated[
    str, Kind(Literal["int4", "int8", "w8a8", "fp8", "w4a8", "kv-4bit-best", "paper"], heading=_IN_RECIPE)
]
Kernel = Annotated[str, Kind(Literal["sage2", "sage2-int4", "sage3", "fa3-fp8", "modelopt-nvfp4"], heading=_IN_RECIPE)]
Residual = Annotated[int, Kind(int, "TOKENS", heading=_IN_RECIPE)]
Overrides = Annotated[
    Mapping[str, str] | Sequence[str],
    Kind(str, "PATTERN=SCHEME", is_repeatable=True, former_name="override", heading=_IN_RECIPE),
]
StoredDtype = Annotated["torch.dtype | str", Kind(Literal["bfloat16", "float16", "float32"], "NAME")]
DeviceMap = Annotated["AnyDeviceMap", Kind(Literal["auto"])]
Push = Annotated[str, Kind(str, "ORG/NAME")]
