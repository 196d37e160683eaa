"""Commands generated from verbs: the signature defines the options, the docstring their help."""

import inspect
import re
import sys
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import BadParameter
from typer.core import TyperArgument, TyperCommand, TyperGroup

from diffquant import verbs
from diffquant.errors import DiffQuantError, UsageError
from diffquant.measure.task import TaskOption
from diffquant.measure.tasks import task_options
from diffquant.support.installation import __version__
from diffquant.support.machine import limit_spinning
from diffquant.support.names import option_name, use_option_names
from diffquant.support.program import exit_codes
from diffquant.verbs import GROUPS
from diffquant.verbs.cli.show import VIEWS, ResultView, print_notes, print_piece, show_loading
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
# Options that exist only on the command line.
_JSON = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
_DETAILS = Annotated[bool, typer.Option("--details", help="Print all that was compared, in a table.")]
_RECIPE_OPTIONS = tuple(inspect.signature(recipe_from_options).parameters)
_DRY_RUN = Annotated[bool, typer.Option("--dry-run", help="Print what would be done and stop.")]


@dataclass(frozen=True)
class Option:
    """An argument or option of a command.

    Attributes:
        name: name of the verb's parameter, or of a task's option.
        kind: how the command line reads it.
        default: default on the command line; `inspect.Parameter.empty` if it is required.
        help: its sentence in the help.
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
        if kind.is_positional:
            info = typer.Argument(**look)
        else:
            with use_option_names():
                names = option_name(self.name, False if self.is_inverted else None), kind.short
            info = typer.Option(*filter(None, names), **look, rich_help_panel=kind.heading)
        annotation = Annotated[read, info]  # type: ignore[valid-type]
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)

    def convert(self, read: Any) -> Any:
        """Convert a value that typer parsed to the verb's argument."""
        if self.kind.is_repeatable:
            return tuple(read or ())
        if self.kind.accepts_stdin and read == "-":
            try:
                return sys.stdin.read()
            except UnicodeDecodeError as error:
                raise UsageError(f"standard input is not UTF-8 text ({error}); convert it first") from error
        return not read if self.is_inverted else read


def command_name(verb: Callable[..., Any]) -> str:
    """Return the name of a verb's command."""
    return "eval" if verb is verbs.evaluate else verb.__name__.replace("_", "-")


def make_command(verb: Callable[..., Any]) -> Callable[..., None]:
    """Return a function for typer that has a verb's options, runs the verb and prints the result."""
    options, view = {option.name: option for option in list_options(verb)}, VIEWS.get(command_name(verb), ResultView())
    parameters = [option.to_parameter() for option in options.values()]
    own = inspect.signature(verb).parameters
    extra = {"dry_run": _DRY_RUN} if "on_plan" in own else {}
    extra |= {"details": _DETAILS} if view.details else {}
    extra |= {"as_json": _JSON} if view.data else {}

    def run(as_json: bool = False, dry_run: bool = False, details: bool = False, **read: Any) -> None:
        given = {name: options[name].convert(value) for name, value in read.items()}
        if "on_text" in own and not as_json:
            given["on_text"] = print_piece
        if dry_run:
            given["on_plan"] = view.print_plan_and_exit
        # Before torch is loaded. `bench` keeps the default, so that its timings are comparable.
        if verb is not verbs.bench:
            limit_spinning()
        with use_option_names(), print_notes(as_json), show_loading(command_name(verb), prints=verb is verbs.serve):
            try:
                # Without `check_arguments`, because typer has already checked the values.
                if "recipe" in own:
                    made_of = {name: given.pop(name) for name in _RECIPE_OPTIONS}
                    given["recipe"] = recipe_from_options(**made_of)
                result = inspect.unwrap(verb)(**given)
            except DiffQuantError as error:
                if error.result is not None:
                    view.show(error.result, given, as_json, str(error), details)
                raise
            view.show(result, given, as_json, is_detailed=details)

    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=False)
        for name, annotation in extra.items()
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__doc__ = split_docstring(verb)[0]
    return run


def former_names(verb: Callable[..., Any]) -> dict[str, str]:
    """Return the current name of each option's former name, which still works."""
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


# Newer typers contain their own copy of click.
_CommandLineError: Any = BadParameter.__base__
# Options of other tools, by the option with the same effect here.
ELSEWHERE = {
    "--weights BITS:gSIZE, such as 4:g32": ("bits", "wbits", "w-bits", "q-bits", "group-size", "q-group-size"),
    "--rounding NAME, such as gptq": ("method", "algorithm", "quant-method"),
    "--kv BITS, such as 8": ("kv-cache-dtype", "kv-bits", "cache-type"),
    "MODEL, the first argument": ("model", "pretrained", "hf-path"),
    # Former options of diffquant.
    "diffquant compare A B, with two folders of bench": ("compare",),
    "--observer percentile:99.9": ("percentile",),
    "OMP_NUM_THREADS in the environment": ("threads",),
    "diffquant sweep --limit NUMBER, the number of items": ("minutes",),
}


class VerbCommand(TyperCommand):
    """A command whose help groups options under headings."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in self.params:
            if isinstance(parameter, TyperArgument):
                # Its name is a placeholder already; newer typers add Python's type.
                parameter.display_type_rich = _nothing  # type: ignore[method-assign]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except BadParameter as error:
            # A prefix from the library with which typer checks values.
            error.message = error.message.removeprefix("Value error, ")
            raise
        except _CommandLineError as error:
            name = getattr(error, "option_name", None) or ""
            if ours := next((ours for ours, names in ELSEWHERE.items() if name.removeprefix("--") in names), None):
                error.message = f"No such option: {name}; use {ours}"
                error.possibilities = ()
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            is_argument = isinstance(parameter, TyperArgument)
            heading = "Arguments" if is_argument else getattr(parameter, "rich_help_panel", None) or "Options"
            if record := parameter.get_help_record(ctx):
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        # In one line, however long, so that it can be copied.
        with formatter.section("Example"):
            formatter.write(f"{'':{formatter.current_indent}}{(self.epilog or '').split('`')[1]}\n")


class VerbGroup(TyperGroup):
    """The list of verbs, grouped under headings, each with the first sentence of its help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        for group, members in GROUPS.items():
            names = [command_name(verb) for verb in members]
            with formatter.section(group):
                formatter.write_dl([(name, (self.commands[name].help or "").partition("\n")[0]) for name in names])


def _nothing(ctx: Any) -> None:
    """Hide the type after an argument's name."""


app = typer.Typer(
    name="diffquant",
    cls=VerbGroup,
    help="Quantize, evaluate and run Differential Transformer language models in low bits.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line."""
    with exit_codes():
        app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"diffquant {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options that every command line may have before its verb."""


for _verb in (verb for group in GROUPS.values() for verb in group):
    _former = former_names(_verb)
    app.command(
        command_name(_verb),
        cls=VerbCommand,
        epilog=f"Example: `{split_docstring(_verb)[1]}`",
        context_settings={"token_normalize_func": lambda name, former=_former: former.get(name, name)},
    )(make_command(_verb))
