"""Commands made of verbs, and the layout of their help."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer import BadParameter
from typer.core import TyperArgument, TyperCommand, TyperGroup

from diffquant import verbs
from diffquant.errors import DiffQuantError
from diffquant.support.installation import __version__
from diffquant.support.machine import limit_spinning
from diffquant.support.names import use_option_names
from diffquant.support.program import exit_codes
from diffquant.verbs import GROUPS
from diffquant.verbs.cli.options import documentation, former_names, options_of
from diffquant.verbs.cli.show import SHOWN, Shown, notes, speak, waiting
from diffquant.verbs.recipes import recipe_of_options

# What only the terminal has.
_JSON = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
_DETAILS = Annotated[bool, typer.Option("--details", help="Print all that was compared, in a table.")]
_RECIPE_OPTIONS = tuple(inspect.signature(recipe_of_options).parameters)
_DRY_RUN = Annotated[bool, typer.Option("--dry-run", help="Print what would be done and stop.")]


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
