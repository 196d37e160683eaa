"""Checks before writing: a verb may only replace files that diffquant wrote."""

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from diffquant.errors import OutputExistsError
from diffquant.support.files import check_writable, read_bytes
from diffquant.support.listing import first_few
from diffquant.support.plain_data import parse_json

# Of a checkpoint's or an export's folder, and of no run's.
_OF_MODELS = ("config.json", "model.safetensors", "model.onnx")


def check_replaced(folder: Path, replaced: Iterable[str], own: Collection[str]) -> None:
    """Check that diffquant wrote everything that an output would replace in a folder.

    Args:
        replaced: names that already exist and would be replaced.
        own: names that diffquant is known to have written.

    Raises:
        OutputExistsError: something else wrote some of them.
    """
    foreign = sorted(set(replaced) - set(own))
    if foreign:
        raise OutputExistsError(
            f"{folder} holds {first_few(foreign, ', ')}, which diffquant did not write there; "
            "it will not be overwritten: move it away or choose another output"
        )


@dataclass(frozen=True)
class RunFiles:
    """The files that a run writes into a folder, which may hold other files.

    Attributes:
        data: name of the JSON file with the numbers, which identifies a run.
        fields: fields that this file must have.
        beside: names of the files made from it.
        joins_models: whether they may stand in a model's own folder.
    """

    data: str
    fields: frozenset[str]
    beside: tuple[str, ...]
    joins_models: bool = False

    def check(self, folder: Path) -> None:
        """Check before the work that these files can be written and replace only those of an earlier run.

        Raises:
            OutputExistsError: files of these names exist, but no run's numbers; or a model is there.
            UsageError: nothing can be written there.
        """
        check_writable(folder)
        if not (self.joins_models or self.is_run(folder)) and any((folder / name).exists() for name in _OF_MODELS):
            raise OutputExistsError(f"{folder} is a model's folder; choose another output")
        there = [name for name in (self.data, *self.beside) if os.path.lexists(folder / name)]
        check_replaced(folder, there, there if self.is_run(folder) else ())

    def is_run(self, folder: Path) -> bool:
        """Whether a folder holds a run's numbers."""
        return has_fields(folder / self.data, self.fields)


def has_fields(file: Path, fields: Collection[str]) -> bool:
    """Whether a file is a JSON object with these fields."""
    try:
        data = parse_json(read_bytes(file))
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and data.keys() >= set(fields)


def check_written_file(file: Path, is_own: bool) -> None:
    """Check that a file can be written and would only replace one of diffquant's.

    Args:
        is_own: whether the existing file is one of diffquant's.

    Raises:
        OutputExistsError: the existing file is not diffquant's.
        UsageError: nothing can be written there.
    """
    check_writable(file.absolute().parent)
    check_replaced(file.absolute().parent, [file.name] if os.path.lexists(file) else [], [file.name] if is_own else [])
