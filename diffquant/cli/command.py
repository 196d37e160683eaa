"""Commands made of verbs: a verb's signature gives the options, its docstring their help."""

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
from diffquant.cli.docstrings import documentation
from diffquant.cli.show import SHOWN, Shown, notes, waiting
from diffquant.errors import DiffQuantError, UsageError
from diffquant.evals.task import TaskOption
from diffquant.evals.tasks import task_options
from diffquant.support.spelling import command_line, spelled
from diffquant.support.waits import wait_briefly
from diffquant.verbs.kinds import Kind, kind_of

_TASK_WORDS = {int: "NUMBER", str: "LIST", Path: "FILE"}
# What only the terminal has.
_JSON = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
_DETAILS = Annotated[bool, typer.Option("--details", help="Print all that was compared, in a table.")]
_DRY_RUN = Annotated[bool, typer.Option("--dry-run", help="Print what would be done and stop.")]


@dataclass(frozen=True)
class Option:
    """An argument or option of a command.

    Attributes:
        name: name of the verb's parameter, or of a task's option.
        kind: how it is read.
        default: default on the command line; `inspect.Parameter.empty` where it has to be given.
        help: sentence of the help.
    """

    name: str
    kind: Kind
    default: Any
    help: str

    @property
    def is_inverted(self) -> bool:
        """Whether it is a flag for False, such as --no-cache."""
        return self.kind.type is bool and self.default is True

    @property
    def spelling(self) -> str:
        with command_line():
            return spelled(self.name, False if self.is_inverted else None)

    def parameter(self) -> inspect.Parameter:
        """The parameter of a function that typer makes a command of."""
        read, default = self.kind.type, False if self.is_inverted else self.default
        if self.kind.repeats:
            read, default = list[read], default or None  # type: ignore[valid-type]
        elif self.kind.is_needed:
            default = inspect.Parameter.empty
        elif read is str and isinstance(default, int):
            default = str(default)
        read = read | None if default is None else read
        look: dict[str, Any] = {
            "metavar": self.kind.word,
            "help": self.help,
            "min": self.kind.least,
            "max": self.kind.most,
        }
        short = [self.kind.short] if self.kind.short else []
        if self.kind.by_place:
            info = typer.Argument(**look)
        else:
            info = typer.Option(self.spelling, *short, **look, rich_help_panel=self.kind.heading)
        annotation = Annotated[read, info]  # type: ignore[valid-type]
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)

    def value(self, read: Any) -> Any:
        """The verb's value of what typer read."""
        if self.kind.repeats:
            return tuple(read or ())
        if self.kind.or_stdin and read == "-":
            try:
                return sys.stdin.read()
            except UnicodeDecodeError as error:
                raise UsageError(f"standard input is no text in UTF-8 ({error}); convert it first") from error
        return not read if self.is_inverted else read


def name_of(verb: Callable[..., Any]) -> str:
    """The command's name of a verb."""
    return "eval" if verb is verbs.evaluate else verb.__name__.replace("_", "-")


def command(verb: Callable[..., Any]) -> Callable[..., None]:
    """A function with an option for each parameter of a verb, which runs it and shows what comes out."""
    options, shown = {option.name: option for option in options_of(verb)}, SHOWN.get(name_of(verb), Shown())
    parameters = [option.parameter() for option in options.values()]
    own = inspect.signature(verb).parameters
    extra = {"dry_run": _DRY_RUN} if "planned" in own else {}
    extra |= {"details": _DETAILS} if shown.details else {}
    extra |= {"as_json": _JSON} if shown.data else {}

    def run(as_json: bool = False, dry_run: bool = False, details: bool = False, **read: Any) -> None:
        given = {name: options[name].value(value) for name, value in read.items()}
        if "said" in own and not as_json:
            given["said"] = shown.speak
        if dry_run:
            given["planned"] = shown.stop_at
        # Before torch is loaded. What `bench` times has to wait as it does elsewhere.
        if verb is not verbs.bench:
            wait_briefly()
        with command_line(), notes(as_json), waiting(name_of(verb), prints=verb is verbs.serve):
            try:
                # As it is: typer has checked what `checked` would.
                result = inspect.unwrap(verb)(**given)
            except DiffQuantError as error:
                if error.result is not None:
                    shown.show(error.result, given, as_json, str(error), details)
                raise
            shown.show(result, given, as_json, is_detailed=details)

    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=False)
        for name, annotation in extra.items()
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__doc__ = documentation(verb).text
    return run


def former_names(verb: Callable[..., Any]) -> dict[str, str]:
    """Names that options had, which still work, with the names they have now."""
    return {option.kind.former: option.name for option in options_of(verb) if option.kind.former}


@cache
def options_of(verb: Callable[..., Any]) -> tuple[Option, ...]:
    """The parameters of a verb that the command line can give, in their order."""
    options: list[Option] = []
    for name, each in inspect.signature(verb).parameters.items():
        if each.kind is inspect.Parameter.VAR_KEYWORD:
            options += map(_task_option, task_options())
        elif given := kind_of(each.annotation):
            options.append(Option(name, given, each.default, _help(verb, name, given)))
    return tuple(options)


def _task_option(option: TaskOption[object]) -> Option:
    given = Kind(option.kind, _TASK_WORDS.get(option.kind), least=option.minimum, heading="Options of tasks")
    default = option.default if option.written is None else option.written
    return Option(option.name, given, default, _as_options(option.help, {other.name for other in task_options()}))


def _help(verb: Callable[..., Any], name: str, kind: Kind) -> str:
    """A parameter's help, of what the docstring says for Python too."""
    text = re.sub(r" In Python .*?\.(?= |$)", "", _entry(verb, name)).removeprefix("False ")
    text = _as_options(text, inspect.signature(verb).parameters)
    known = f": {', '.join(kind.known())}." if kind.known else "."
    repeated = " May be repeated." if kind.repeats and not kind.by_place else ""
    return text[:1].upper() + text[1:].removesuffix(".") + known + repeated


def _as_options(text: str, names: Container[str]) -> str:
    """A text whose `names` are those of options; what else is in backticks is a plain word."""
    with command_line():
        return re.sub(r"`(\w+)`", lambda word: spelled(word[1]) if word[1] in names else word[1], text)


def _entry(verb: Callable[..., Any], name: str) -> str:
    """A parameter's entry in a docstring, which may say which other verb takes it alike."""
    text = documentation(verb).entries.get(name, "")
    alike = re.match(r"as `(\w+)` takes (?:it|them)\.", text)
    return _entry(getattr(verbs, alike[1]), name) if alike else text
