"""Verbs in the help: in groups, in whole sentences, with words for values."""

from typing import Any

from typer import BadParameter
from typer.core import TyperArgument, TyperCommand, TyperGroup

from diffquant.cli.command import name_of
from diffquant.verbs import GROUPS


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
        for group, verbs in GROUPS.items():
            names = [name_of(verb) for verb in verbs]
            with formatter.section(group):
                formatter.write_dl([(name, (self.commands[name].help or "").partition("\n")[0]) for name in names])


def _nothing(ctx: Any) -> None:
    """No type behind an argument's name."""
