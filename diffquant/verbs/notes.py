"""Messages that verbs print in addition to their results, and uploads to the Hugging Face hub."""

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


def check_push(repository: str | None, output: Path | str = "") -> None:
    """Check, before work starts, that the output can be pushed to the hub.

    Args:
        repository: repository on the hub, or None to check nothing.
        output: path of the output that will be written.

    Raises:
        UsageError: the output is a single file.
        DiffQuantError: see `diffquant.checkpoints.hub.check_pushable`.
    """
    if repository is not None:
        from diffquant.checkpoints.hub import check_pushable
        from diffquant.checkpoints.location import is_gguf

        if is_gguf(Path(output)):
            raise UsageError(f"{option_name('push', repository)} uploads a folder, not a file; give a folder as output")
        check_pushable(repository)


def push_folder(folder: Path | str, repository: str | None) -> None:
    """Push a folder to the hub, and print what is sent and its URL.

    Args:
        repository: repository on the hub, or None to push nothing.

    Raises:
        CheckpointError: the hub refuses the upload, or cannot be reached.
    """
    if repository is not None:
        from diffquant.checkpoints.hub import describe_push, push

        say(describe_push(Path(folder), repository))
        say(f"pushed to {push(Path(folder), repository)}")


LOGGER = logging.getLogger("diffquant.verbs")
say = LOGGER.info


def print_output(text: str) -> None:
    """Print part of the output of a verb that returns nothing."""
    clear_line()
    print(fit_to_terminal(text, sys.stdout), flush=True)


def say_after_result(text: str, *, aside: bool = False) -> None:
    """Print a message after the result.

    Args:
        aside: whether to print to stderr, for a message that is not part of the result.
    """
    LOGGER.info(text, extra={"follows": True, "aside": aside})


def say_files_written(files: Iterable[Path | str]) -> None:
    """Print the names of written files after the result."""
    say_after_result(f"wrote {', '.join(map(str, files))}")


def choose_device(device: str) -> str:
    """Return the device to run a model on. Print it if "auto" chose one other than the CPU.

    Raises:
        UsageError: there is no such device.
    """
    from diffquant.support.devices import describe_device, resolve_device

    chosen = resolve_device(device)
    if device == "auto" and chosen != "cpu":
        say(f"runs on {describe_device(chosen)}")
    return chosen


def note_if_transformer(source: "Source | WeightSource") -> None:
    """Print a note if a model has no differential attention, because the user may have meant a DIFF model."""
    from diffquant.checkpoints.source import Source

    if isinstance(source, Source) and source.spec.maps == 1:
        say(f"note: {source.path} is a plain Transformer, without differential attention")
