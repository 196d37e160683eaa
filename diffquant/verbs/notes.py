"""Remarks of verbs beside their results: logged for Python, shown on stderr by the command line."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffquant.source.source import Source
    from diffquant.source.weight_source import WeightSource

LOGGER = logging.getLogger("diffquant.verbs")
say = LOGGER.info


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
    """The device that a model runs on; where "auto" found another than the processor, it is said.

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
    from diffquant.source.source import Source

    if isinstance(source, Source) and source.spec.maps == 1:
        say(f"note: {source.path} is a plain Transformer, without differential attention")
