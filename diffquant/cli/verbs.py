"""Verbs in the help: in groups, in whole sentences, with words for values. A verb says at once that it is loading."""

import sys
from typing import Any

from typer.core import TyperArgument, TyperCommand, TyperGroup

# Headings of the help with their verbs, in order; others stand under one more.
GROUPS = {
    "Make": ("quantize", "convert", "search", "calibrate"),
    "Measure": ("eval", "sweep", "compare", "fidelity", "report", "outliers", "attention-map", "bench"),
    "Run": ("generate", "export", "verify", "run"),
    "Set up": ("inspect", "doctor", "demo"),
}


class Verb(TyperCommand):
    """A command whose help has words for values, and which says at once that it is loading."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in self.params:
            if isinstance(parameter, TyperArgument):
                # Its name is a word already; newer typers add Python's type.
                parameter.display_type_rich = _nothing  # type: ignore[method-assign]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        # In one line, however long, so that it can be copied.
        with formatter.section("Example"):
            formatter.write(f"{'':{formatter.current_indent}}{(self.epilog or '').split('`')[1]}\n")

    def invoke(self, ctx: Any) -> Any:
        # On a terminal, since importing torch may take longer than people wait for a sign of life.
        if sys.stderr.isatty() and "torch" not in sys.modules:
            sys.stderr.write("loading ...")
            sys.stderr.flush()
            try:
                import torch  # noqa: F401
            finally:
                sys.stderr.write("\r\x1b[K")
        return super().invoke(ctx)


class VerbGroup(TyperGroup):
    """The verbs under headings, each with the first sentence of its help."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        sentences = {name: (command.help or "").partition("\n")[0] for name, command in self.commands.items()}
        grouped = {name for verbs in GROUPS.values() for name in verbs}
        groups = GROUPS | {"More": tuple(name for name in sentences if name not in grouped)}
        for group, verbs in groups.items():
            if rows := [(name, sentences[name]) for name in verbs if name in sentences]:
                with formatter.section(group):
                    formatter.write_dl(rows)


def _nothing(ctx: Any) -> None:
    """No type behind an argument's name."""
