"""The registry of tasks: one file each, which registers itself. No torch here."""

import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import TypeVar

from diffquant.errors import UsageError
from diffquant.measure.task import Task, TaskOption
from diffquant.support.names import import_all, option_name

_KINDS: dict[str, type[Task]] = {}

_Task = TypeVar("_Task", bound=type[Task])


def register(task: _Task) -> _Task:
    """Register a task's class under its kind, and return it; use this as a class decorator.

    Raises:
        ValueError: the kind is already registered, or another task has a different option with the same name.
    """
    if task.kind in _KINDS:
        raise ValueError(f"task {task.kind!r} is registered twice")
    known = {option.name: option for other in _KINDS.values() for option in other.options}
    conflicting = [option.name for option in task.options if known.get(option.name, option) != option]
    if conflicting:
        raise ValueError(f"other tasks have different options named {', '.join(conflicting)}")
    _KINDS[task.kind] = task
    return task


def task_kinds() -> list[type[Task]]:
    """Return the class of every task."""
    _import_tasks()
    return list(_KINDS.values())


def task_class_named(name: str) -> type[Task]:
    """Return the class of a task from the kind in the task's name: "needle" in "needle:4:2".

    Raises:
        UsageError: there is no task of this kind.
    """
    _import_tasks()
    kind = name.partition(":")[0]
    if kind not in _KINDS:
        near = get_close_matches(kind, list(_KINDS), n=1)
        # Sorted, since the order of imports may vary.
        usages = ", ".join(sorted(task.usage for task in task_kinds()))
        known = f"choose from {usages}; if it is a task of lm-eval, give lm-eval:{kind}"
        if near:
            known = f"did you mean {near[0]!r}?"
        raise UsageError(f"unknown task {name!r}; {known}")
    return _KINDS[kind]


def task_options() -> list[TaskOption[object]]:
    """Return the options of all tasks, without duplicates."""
    return list({option.name: option for task in task_kinds() for option in task.options}.values())


def check_options(values: Mapping[str, object]) -> None:
    """Check that every option in `values` belongs to at least one task.

    Raises:
        UsageError: some options belong to no task; the message names them.
    """
    unknown = sorted(values.keys() - {option.name for option in task_options()})
    if unknown:
        raise UsageError(f"no task has an option {', '.join(unknown)}")


def make_tasks(names: Sequence[str], values: Mapping[str, object], batch_tokens: int) -> list[Task]:
    """Make the tasks with these names, without duplicates, and read their items and text.

    Args:
        values: values of the tasks' options by name.

    Raises:
        UsageError: a task is unknown, its items or text cannot be read, or a given option would affect none of the
            tasks. The message lists all errors.
        MissingDependencyError: a package that a task needs is not installed.
    """
    tasks, faults = [], []
    for name in dict.fromkeys(names):
        try:
            tasks.append(task_class_named(name).parse(name, values, batch_tokens))
        except UsageError as error:
            faults.append(str(error))
    if not faults:
        faults = _idle_options(tasks, values)
    if faults:
        raise UsageError("; ".join(dict.fromkeys(faults)))
    # A task may have several names, such as needle and needle:1.
    return list({task.name: task for task in tasks}.values())


def _idle_options(tasks: Sequence[Task], values: Mapping[str, object]) -> list[str]:
    """Return a message, in a list, about given options that none of the tasks has; empty if there are none."""
    taken = {option.name for task in tasks for option in task.options}
    idle = [o.name for o in task_options() if o.name not in taken and o.value_in(values) != o.default]
    if not tasks or not idle:
        return []
    names = ", ".join(task.name for task in tasks)
    given, known = (", ".join(map(option_name, each)) for each in (idle, sorted(taken)))
    return [f"{given} would not affect {names}; choose from {known}"]


@cache
def _import_tasks() -> None:
    import_all(sys.modules[__name__])
