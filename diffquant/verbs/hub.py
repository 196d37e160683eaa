"""The Hugging Face hub for verbs: models are fetched from it and outputs may be pushed to it."""

from pathlib import Path
from typing import TypeVar

from diffquant.errors import UsageError
from diffquant.support.spelling import spelled
from diffquant.verbs.notes import say

_Opened = TypeVar("_Opened")


def at_revision(model: Path | str | _Opened, revision: str | None) -> Path | _Opened:
    """A model's path, a revision of the hub as part of its name; what is open already stays as it is.

    Raises:
        UsageError: a revision of a folder or file is asked for.
    """
    if not isinstance(model, Path | str):
        return model
    if revision is not None and Path(model).exists():
        raise UsageError(
            f"{model} lies here, and only models on the hub have revisions: leave out {spelled('revision')}"
        )
    return Path(model) if revision is None else Path(f"{model}@{revision}")


def check_push(model: str | None) -> None:
    """Check, before the work, that its output can be pushed where that is wanted.

    Raises:
        DiffQuantError: as `diffquant.formats.hub.check_pushable` raises it.
    """
    if model is not None:
        from diffquant.formats.hub import check_pushable

        check_pushable(model)


def push_folder(folder: Path | str, model: str | None) -> None:
    """Push a folder where that is wanted, and say what is sent and where it is now.

    Raises:
        CheckpointError: the hub refuses, or cannot be reached.
    """
    if model is not None:
        from diffquant.formats.hub import published, push

        say(published(Path(folder), model))
        say(f"pushed to {push(Path(folder), model)}")
