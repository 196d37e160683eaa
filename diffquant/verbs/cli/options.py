"""Options generated from verbs: the signature defines the options, the docstring their help."""

import inspect
import re
import sys
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from diffquant import verbs
from diffquant.errors import UsageError
from diffquant.measure.task import TaskOption
from diffquant.measure.tasks import task_options
from diffquant.support.names import option_name, use_option_names
from diffquant.verbs.kinds import Kind, kind_of
from diffquant.verbs.recipes import recipe_from_options


@cache
def split_docstring(verb: Callable[..., Any]) -> tuple[str, str, dict[str, str]]:
    """Split a verb's docstring in Google style, where an indented paragraph contains the examples.

    Returns:
        The paragraphs, the example command line, and the description of each parameter by name. Under python -OO there
        are no docstrings, so all are empty.
    """
    body, _, rest = (inspect.getdoc(verb) or "").partition("\nArgs:\n")
    paragraphs = body.partition("\nRaises:\n")[0].strip().split("\n\n")
    examples = [line.strip() for each in paragraphs if each.startswith("    ") for line in each.splitlines()]
    entries = {
        name: " ".join(text.split())
        for names, text in re.findall(r"^ {4}(\w[\w, ]*): (.*(?:\n {5,}.*)*)", rest.partition("\n\n")[0], re.MULTILINE)
        for name in names.split(", ")
    }
    text = "\n\n".join(each for each in paragraphs if not each.startswith("    "))
    example = next((line for line in examples if line.startswith("diffquant ")), "diffquant --help")
    return text, example, entries


_TASK_WORDS = {int: "NUMBER", str: "LIST", Path: "FILE"}


@dataclass(frozen=True)
class Option:
    """An argument or option of a command.

    Attributes:
        name: name of the verb's parameter, or of a task's option.
        kind: how the command line reads it.
        default: default on the command line; `inspect.Parameter.empty` if it is required.
        help: description in the help.
    """

    name: str
    kind: Kind
    default: Any
    help: str

    @property
    def is_inverted(self) -> bool:
        """Whether it is a flag that sets False, such as --no-cache."""
        return self.kind.type is bool and self.default is True

    def to_parameter(self) -> inspect.Parameter:
        """Return the parameter from which typer makes an option or argument."""
        read, default = self.kind.type, False if self.is_inverted else self.default
        if self.kind.is_repeatable:
            read, default = list[read], default or None  # type: ignore[valid-type]
        elif read is str and isinstance(default, int):
            default = str(default)
        read = read | None if default is None else read
        kind = self.kind
        look: dict[str, Any] = {"metavar": kind.placeholder, "help": self.help, "min": kind.least, "max": kind.most}
        look["case_sensitive"] = False
        if kind.is_positional:
            info = typer.Argument(**look)
        else:
            with use_option_names():
                names = option_name(self.name, False if self.is_inverted else None), kind.short
            info = typer.Option(*filter(None, names), **look, rich_help_panel=kind.heading)
        annotation = Annotated[read, info]  # type: ignore[valid-type]
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)

    def convert(self, parsed: Any) -> Any:
        """Convert a value that typer parsed to the verb's argument."""
        values = tuple(parsed or ()) if self.kind.is_repeatable else (parsed,)
        if self.kind.check:
            for value in values if parsed is not None else ():
                self.kind.check(value)
        if self.kind.is_repeatable:
            return values
        if self.kind.accepts_stdin and parsed == "-":
            try:
                return sys.stdin.read()
            except UnicodeDecodeError as error:
                raise UsageError(f"standard input is not UTF-8 text ({error}); convert it first") from error
        return not parsed if self.is_inverted else parsed


def former_names(verb: Callable[..., Any]) -> dict[str, str]:
    """Return a verb's options that were renamed: the current name by former name, which still works."""
    return {option.kind.former_name: option.name for option in list_options(verb) if option.kind.former_name}


@cache
def list_options(verb: Callable[..., Any]) -> tuple[Option, ...]:
    """Return the command-line options of a verb, in order."""
    options: list[Option] = []
    for name, each in inspect.signature(verb).parameters.items():
        if each.kind is inspect.Parameter.VAR_KEYWORD:
            options += map(_task_option, task_options())
        elif name == "recipe" and verb is not recipe_from_options:
            options += list_options(recipe_from_options)
        elif given := kind_of(each.annotation):
            options.append(Option(name, given, each.default, _help(verb, name, given)))
    return tuple(options)


def _task_option(option: TaskOption[object]) -> Option:
    given = Kind(option.kind, _TASK_WORDS.get(option.kind), least=option.minimum, heading="Task options")
    default = option.default if option.written is None else option.written
    return Option(option.name, given, default, _as_options(option.help, {other.name for other in task_options()}))


def _help(verb: Callable[..., Any], name: str, kind: Kind) -> str:
    """Return a parameter's help, from its entry in the docstring."""
    text = re.sub(r" In Python .*?\.(?= |$)", "", _entry(verb, name)).removeprefix("False ")
    text = _as_options(text, inspect.signature(verb).parameters)
    known = f": {', '.join(kind.list_values())}." if kind.list_values else "."
    repeated = " May be repeated." if kind.is_repeatable and not kind.is_positional else ""
    return text[:1].upper() + text[1:].removesuffix(".") + known + repeated


def _as_options(text: str, names: Container[str]) -> str:
    """Replace parameters in backticks by their options; other words only lose the backticks."""
    with use_option_names():
        return re.sub(r"`(\w+)`", lambda word: option_name(word[1]) if word[1] in names else word[1], text)


def _entry(verb: Callable[..., Any], name: str) -> str:
    """Return a parameter's docstring entry; "see `VERB`." refers to the same parameter of another verb."""
    text = split_docstring(verb)[2].get(name, "")
    reference = re.match(r"see `(\w+)`\.", text)
    return _entry(getattr(verbs, reference[1]), name) if reference else text
