"""Commands generated from verbs, and the layout of their help."""

import inspect
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Any

import typer
from typer import BadParameter
from typer.core import TyperArgument, TyperCommand, TyperGroup

from diffquant import verbs
from diffquant.errors import DiffQuantError, UsageError
from diffquant.recipe.scheme import explain_foreign_name
from diffquant.support.installation import __version__
from diffquant.support.machine import limit_spinning
from diffquant.support.names import use_option_names
from diffquant.support.program import exit_codes
from diffquant.verbs import GROUPS
from diffquant.verbs.arguments import OPTIONS_ELSEWHERE
from diffquant.verbs.cli.options import former_names, list_options, split_docstring
from diffquant.verbs.cli.show import VIEWS, ResultView, print_notes, print_piece, show_importing
from diffquant.verbs.recipes import recipe_from_options

# Options that exist only on the command line.
_JSON = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
_DETAILS = Annotated[bool, typer.Option("--details", help="Print all that was compared, in a table.")]
_RECIPE_OPTIONS = tuple(inspect.signature(recipe_from_options).parameters)
_DRY_RUN = Annotated[bool, typer.Option("--dry-run", help="Print what would be done and stop.")]


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
        if dry_run and as_json:
            raise UsageError("--dry-run prints text, not JSON; leave out --json")
        given = {name: options[name].convert(value) for name, value in read.items()}
        if "on_text" in own and not as_json:
            given["on_text"] = print_piece
        if dry_run:
            given["on_plan"] = view.print_plan_and_exit
        # Before torch is loaded. `bench` keeps the default, so that its timings are comparable.
        if verb is not verbs.bench:
            limit_spinning()
        with use_option_names(), print_notes(as_json), show_importing(command_name(verb), verb is verbs.serve):
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


# Newer typers contain their own copy of click.
_CommandLineError: Any = BadParameter.__base__
# Options of other tools, by the option with the same effect here.
ELSEWHERE = {
    "--weights BITS:gSIZE, such as 4:g32, or --preset int4": OPTIONS_ELSEWHERE['recipe={"weights": "4:g32"}'],
    "--rounding NAME, such as gptq": OPTIONS_ELSEWHERE['rounding="gptq"'],
    "--kv BITS, such as 8": OPTIONS_ELSEWHERE['recipe={"kv": 8}'],
    "--context TOKENS": ("max-model-len", "ctx-size", "n-ctx", "max-length"),
    "--output FOLDER": ("out", "output-dir", "save-dir", "mlx-path"),
    "MODEL, the first argument": ("model", "pretrained", "hf-path"),
}


class VerbCommand(TyperCommand):
    """A command whose help groups options under headings."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in self.params:
            if isinstance(parameter, TyperArgument):
                # Its name is a placeholder already; newer typers add Python's type.
                parameter.display_type_rich = lambda ctx: None  # type: ignore[method-assign]  # noqa: ARG005

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = " ".join(args).replace("=", " ").split()
        try:
            return super().parse_args(ctx, args)
        except BadParameter as error:
            # Words of the library with which typer checks values.
            message = error.message.removeprefix("Value error, ").replace("Input should", "it must")
            options = getattr(error.param, "opts", ())
            value = next((value for option, value in pairwise(given) if option in options), "")
            error.message = "; ".join(filter(None, [_explain_value(value), message]))
            raise
        except _CommandLineError as error:
            name = getattr(error, "option_name", None) or ""
            has = ("MODEL", *(option for each in self.params for option in each.opts))
            found = (ours for ours, names in ELSEWHERE.items() if name.removeprefix("--") in names)
            if ours := next((ours for ours in found if ours.startswith(has)), None):
                error.message = f"No such option: {name}; use {ours}"
                error.possibilities = ()
            elif "extra argument" in error.message and any(each.name == "output" for each in self.params):
                error.message += "; give the output as -o OUTPUT"
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

    def get_params(self, ctx: Any) -> list[Any]:
        # Options that install completion come last, which typer puts before --help.
        return sorted(super().get_params(ctx), key=lambda each: "completion" in (each.name or ""))

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        for group, members in GROUPS.items():
            names = [command_name(verb) for verb in members]
            with formatter.section(group):
                formatter.write_dl([(name, (self.commands[name].help or "").partition("\n")[0]) for name in names])


def _explain_value(value: str) -> str:
    """Explain what to give for a value that other tools take, such as 32k or W4A16; "" for another value."""
    if re.fullmatch("[0-9]{1,6}[kK]", value):
        return f"{value} may be {int(value[:-1]) * 1000} or {int(value[:-1]) * 1024}: give one of them"
    return explain_foreign_name(value)


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
