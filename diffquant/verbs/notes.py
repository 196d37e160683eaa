"""What verbs say beside their results, and outputs that are pushed to the Hugging Face hub."""

import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from diffquant.errors import UsageError
from diffquant.support.names import option_name
from diffquant.support.progress import clear_line
from diffquant.support.terminal import fit_to_terminal

if TYPE_CHECKING:
    from diffquant.checkpoints.source import Source
    from diffquant.checkpoints.weight_source import WeightSource


def check_push(model: str | None, output: Path | str = "") -> None:
    """Check, before the work, that its output can be pushed where that is wanted.

    Raises:
        UsageError: the output is a single file.
        DiffQuantError: as `diffquant.checkpoints.hub.check_pushable` raises it.
    """
    if model is not None:
        from diffquant.checkpoints.hub import check_pushable
        from diffquant.checkpoints.opening import is_gguf

        if is_gguf(Path(output)):
            raise UsageError(f"{option_name('push', model)} uploads a folder with a model card; give one as the output")
        check_pushable(model)


def push_folder(folder: Path | str, model: str | None) -> None:
    """Push a folder where that is wanted, and say what is sent and where it is now.

    Raises:
        CheckpointError: the hub refuses, or cannot be reached.
    """
    if model is not None:
        from diffquant.checkpoints.hub import describe_push, push

        say(describe_push(Path(folder), model))
        say(f"pushed to {push(Path(folder), model)}")


LOGGER = logging.getLogger("diffquant.verbs")
say = LOGGER.info


def show(text: str) -> None:
    """Print a part of the output of a verb that returns nothing."""
    clear_line()
    print(fit_to_terminal(text, sys.stdout), flush=True)


def add(text: str, *, aside: bool = False) -> None:
    """Say what follows a result.

    Args:
        aside: whether it is no part of the result, so that the command line shows it on stderr.
    """
    LOGGER.info(text, extra={"follows": True, "aside": aside})


def wrote(files: Iterable[Path | str]) -> None:
    """Say, behind a result, which files were written."""
    add(f"wrote {', '.join(map(str, files))}")


def chosen_device(device: str) -> str:
    """Return the device that a model runs on; if "auto" chose one other than the CPU, report it.

    Raises:
        UsageError: there is no such device.
    """
    from diffquant.support.devices import describe_device, resolve_device

    chosen = resolve_device(device)
    if device == "auto" and chosen != "cpu":
        say(f"runs on {describe_device(chosen)}")
    return chosen


def note_if_transformer(source: "Source | WeightSource") -> None:
    """Say that a model has no differential attention, since a DIFF model may have been meant."""
    from diffquant.checkpoints.source import Source

    if isinstance(source, Source) and source.spec.maps == 1:
        say(f"note: {source.path} is a plain Transformer, without differential attention")
