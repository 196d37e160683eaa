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
from diffquant.verbs.cli.show import SHOWN, Shown, notes, speak, waiting
from diffquant.verbs.kinds import Kind, kind_of
from diffquant.verbs.recipes import recipe_of_options


@cache
def documentation(verb: Callable[..., Any]) -> tuple[str, str, dict[str, str]]:
    """Split a verb's docstring, in Google's form with its examples as one indented paragraph.

    Returns:
        Its paragraphs, the command line that it shows, and its entries of parameters by name. Under python -OO there
        are none, and the help is bare.
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
# What only the terminal has.
_JSON = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
_DETAILS = Annotated[bool, typer.Option("--details", help="Print all that was compared, in a table.")]
_RECIPE_OPTIONS = tuple(inspect.signature(recipe_of_options).parameters)
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

    def parameter(self) -> inspect.Parameter:
        """Return the parameter that typer makes an option or argument of."""
        read, default = self.kind.type, False if self.is_inverted else self.default
        if self.kind.repeats:
            read, default = list[read], default or None  # type: ignore[valid-type]
        elif read is str and isinstance(default, int):
            default = str(default)
        read = read | None if default is None else read
        kind = self.kind
        look: dict[str, Any] = {"metavar": kind.word, "help": self.help, "min": kind.least, "max": kind.most}
        if kind.by_place:
            info = typer.Argument(**look)
        else:
            with use_option_names():
                names = option_name(self.name, False if self.is_inverted else None), kind.short
            info = typer.Option(*filter(None, names), **look, rich_help_panel=kind.heading)
        annotation = Annotated[read, info]  # type: ignore[valid-type]
        return inspect.Parameter(self.name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)

    def value(self, read: Any) -> Any:
        """Convert what typer read to the verb's value."""
        if self.kind.repeats:
            return tuple(read or ())
        if self.kind.or_stdin and read == "-":
            try:
                return sys.stdin.read()
            except UnicodeDecodeError as error:
                raise UsageError(f"standard input is no text in UTF-8 ({error}); convert it first") from error
        return not read if self.is_inverted else read


def name_of(verb: Callable[..., Any]) -> str:
    """Return the command's name of a verb."""
    return "eval" if verb is verbs.evaluate else verb.__name__.replace("_", "-")


def command(verb: Callable[..., Any]) -> Callable[..., None]:
    """Return a function with an option for each parameter of a verb, which runs it and prints the result."""
    options, shown = {option.name: option for option in options_of(verb)}, SHOWN.get(name_of(verb), Shown())
    parameters = [option.parameter() for option in options.values()]
    own = inspect.signature(verb).parameters
    extra = {"dry_run": _DRY_RUN} if "planned" in own else {}
    extra |= {"details": _DETAILS} if shown.details else {}
    extra |= {"as_json": _JSON} if shown.data else {}

    def run(as_json: bool = False, dry_run: bool = False, details: bool = False, **read: Any) -> None:
        given = {name: options[name].value(value) for name, value in read.items()}
        if "said" in own and not as_json:
            given["said"] = speak
        if dry_run:
            given["planned"] = shown.stop_at
        # Before torch is loaded. What `bench` times has to wait as it does elsewhere.
        if verb is not verbs.bench:
            limit_spinning()
        with use_option_names(), notes(as_json), waiting(name_of(verb), prints=verb is verbs.serve):
            try:
                # As it is: typer has checked what `check_arguments` would.
                if "recipe" in own:
                    made_of = {name: given.pop(name) for name in _RECIPE_OPTIONS}
                    given["recipe"] = recipe_of_options(**made_of)
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
    run.__doc__ = documentation(verb)[0]
    return run


def former_names(verb: Callable[..., Any]) -> dict[str, str]:
    """Names that options had, which still work, with the names they have now."""
    return {option.kind.former: option.name for option in options_of(verb) if option.kind.former}


@cache
def options_of(verb: Callable[..., Any]) -> tuple[Option, ...]:
    """Return the parameters of a verb that the command line can give, in their order."""
    options: list[Option] = []
    for name, each in inspect.signature(verb).parameters.items():
        if each.kind is inspect.Parameter.VAR_KEYWORD:
            options += map(_task_option, task_options())
        elif name == "recipe" and verb is not recipe_of_options:
            options += options_of(recipe_of_options)
        elif given := kind_of(each.annotation):
            options.append(Option(name, given, each.default, _help(verb, name, given)))
    return tuple(options)


def _task_option(option: TaskOption[object]) -> Option:
    given = Kind(option.kind, _TASK_WORDS.get(option.kind), least=option.minimum, heading="Options of tasks")
    default = option.default if option.written is None else option.written
    return Option(option.name, given, default, _as_options(option.help, {other.name for other in task_options()}))


def _help(verb: Callable[..., Any], name: str, kind: Kind) -> str:
    """Return a parameter's help, made of its entry in the docstring."""
    text = re.sub(r" In Python .*?\.(?= |$)", "", _entry(verb, name)).removeprefix("False ")
    text = _as_options(text, inspect.signature(verb).parameters)
    known = f": {', '.join(kind.known())}." if kind.known else "."
    repeated = " May be repeated." if kind.repeats and not kind.by_place else ""
    return text[:1].upper() + text[1:].removesuffix(".") + known + repeated


def _as_options(text: str, names: Container[str]) -> str:
    """Replace `names` in a text by options; other words lose their backticks."""
    with use_option_names():
        return re.sub(r"`(\w+)`", lambda word: option_name(word[1]) if word[1] in names else word[1], text)


def _entry(verb: Callable[..., Any], name: str) -> str:
    """Return a parameter's entry in a docstring, which may say which other verb takes it alike."""
    text = documentation(verb)[2].get(name, "")
    alike = re.match(r"as `(\w+)` takes (?:it|them)\.", text)
    return _entry(getattr(verbs, alike[1]), name) if alike else text


# A typer may have a click of its own.
_CommandLineError: Any = BadParameter.__base__
# Options of other tools, with what does the same here.
ELSEWHERE = {
    "--weights BITS:gSIZE, such as 4:g32": ("bits", "wbits", "w-bits", "q-bits", "group-size", "q-group-size"),
    "--rounding NAME, such as gptq": ("method", "algorithm", "quant-method"),
    "--kv BITS, such as 8": ("kv-cache-dtype", "kv-bits", "cache-type"),
    "MODEL, the first argument": ("model", "pretrained", "hf-path"),
    # Former options of diffquant.
    "diffquant compare A B, of two folders of bench": ("compare",),
    "--observer percentile:99.9": ("percentile",),
    "OMP_NUM_THREADS in the environment": ("threads",),
    "diffquant sweep --limit NUMBER, whose items are yours to choose": ("minutes",),
}


class Verb(TyperCommand):
    """A command whose help has its options under headings, and words for values."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in self.params:
            if isinstance(parameter, TyperArgument):
                # Its name is a word already; newer typers add Python's type.
                parameter.display_type_rich = _nothing  # type: ignore[method-assign]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except BadParameter as error:
            # The words of the library that typer checks values with.
            error.message = error.message.removeprefix("Value error, ")
            raise
        except _CommandLineError as error:
            name = getattr(error, "option_name", None) or ""
            if ours := next((ours for ours, names in ELSEWHERE.items() if name.removeprefix("--") in names), None):
                error.message = f"No such option: {name}; here it is {ours}"
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
    """The verbs under headings, each with the first sentence of its help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        for group, members in GROUPS.items():
            names = [name_of(verb) for verb in members]
            with formatter.section(group):
                formatter.write_dl([(name, (self.commands[name].help or "").partition("\n")[0]) for name in names])


def _nothing(ctx: Any) -> None:
    """No type behind an argument's name."""


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
        name_of(_verb),
        cls=Verb,
        epilog=f"Example: `{documentation(_verb)[1]}`",
        context_settings={"token_normalize_func": lambda name, former=_former: former.get(name, name)},
    )(command(_verb))
