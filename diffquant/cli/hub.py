"""What verbs that make folders do about the Hugging Face hub."""

from pathlib import Path

import typer


def check_push(model: str | None) -> None:
    """Check, before the work, that its output can be pushed where that is wanted.

    Raises:
        DiffQuantError: as `diffquant.formats.hub.check_pushable` raises it.
    """
    if model is not None:
        from diffquant.formats.hub import check_pushable

        check_pushable(model)


def push_folder(folder: Path, model: str | None, quietly: bool) -> None:
    """Push a folder where that is wanted, and say where it is now.

    Args:
        quietly: whether stdout is a program's, so that this goes to stderr.

    Raises:
        CheckpointError: the hub refuses, or cannot be reached.
    """
    if model is not None:
        from diffquant.formats.hub import push

        typer.echo(f"pushed to {push(folder, model)}", err=quietly)
