"""Commands whose options are declared once: a parameter that is a dataclass becomes an option for each field."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from diffquant.evals.task import TaskOption
from diffquant.evals.tasks import task_options

_METAVARS = {int: "NUMBER", str: "LIST", Path: "FILE"}


@dataclass(frozen=True)
class TaskOptions:
    """The options of every task, as given.

    Attributes:
        values: value of each option by name.
    """

    values: Mapping[str, object]


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for each field of its dataclass parameters; `TaskOptions` has those of all tasks."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    signature = inspect.signature(command)
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        kind = groups.get(parameter.name)
        own = [parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)]
        parameters += own if kind is None else _parameters_of_group(kind)

    @wraps(command)
    def run(**values: Any) -> None:
        collected = {name: _collect(kind, values) for name, kind in groups.items()}
        command(**{name: collected.get(name, values.get(name)) for name in signature.parameters})

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameters_of_group(group: Any) -> Iterable[inspect.Parameter]:
    if group is TaskOptions:
        return [_parameter_of_option(option) for option in task_options()]
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=hints[field.name],
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
        )
        for field in fields(group)
    ]


def _parameter_of_option(option: TaskOption[object]) -> inspect.Parameter:
    default = option.written if option.written is not None else option.default
    # A flag has no opposite.
    names = (f"--{option.name.replace('_', '-')}",) if option.kind is bool else ()
    kind: Any = option.kind if default is not None else option.kind | None
    metavar = _METAVARS.get(option.kind)
    annotation = Annotated[kind, typer.Option(*names, metavar=metavar, min=option.minimum, help=option.help)]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _collect(group: Any, values: Mapping[str, Any]) -> object:
    if group is TaskOptions:
        return TaskOptions({option.name: _read_value(option, values[option.name]) for option in task_options()})
    return group(**{field.name: values[field.name] for field in fields(group)})


def _read_value(option: TaskOption[object], value: Any) -> object:
    return option.read(value) if option.read is not None and value is not None else value
