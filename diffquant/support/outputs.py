"""What every verb may replace: what diffquant wrote, and nothing else."""

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from diffquant.errors import OutputExistsError
from diffquant.support.files import check_writable
from diffquant.support.plain_data import parse_json

_NAMED_FILES = 5


def check_replaced(folder: Path, replaced: Iterable[str], own: Collection[str]) -> None:
    """Check that all that an output would replace in a folder was written there by diffquant.

    Args:
        replaced: names that are there already.
        own: names that diffquant is known to have written.

    Raises:
        OutputExistsError: some are somebody else's.
    """
    foreign = sorted(set(replaced) - set(own))
    if foreign:
        more = f" and {len(foreign) - _NAMED_FILES} more" if len(foreign) > _NAMED_FILES else ""
        raise OutputExistsError(
            f"{folder} holds {', '.join(foreign[:_NAMED_FILES])}{more}, which diffquant did not write there; "
            "it will not be overwritten: move it away or choose another output"
        )


@dataclass(frozen=True)
class RunFiles:
    """The files that a run leaves in a folder, which may hold other things.

    Attributes:
        data: name of the file of numbers, by which a run is known.
        fields: names that its JSON object has.
        beside: names of the files that are made from it.
    """

    data: str
    fields: frozenset[str]
    beside: tuple[str, ...]

    def check(self, folder: Path) -> None:
        """Check, before the work, that these files can be written into a folder and replace none but an earlier run's.

        Raises:
            OutputExistsError: files of these names are there, without a run's numbers.
            UsageError: nothing can be written there.
        """
        check_writable(folder)
        there = [name for name in (self.data, *self.beside) if os.path.lexists(folder / name)]
        check_replaced(folder, there, there if self.is_run(folder) else ())

    def is_run(self, folder: Path) -> bool:
        """Whether a folder has a run's numbers."""
        return has_fields(folder / self.data, self.fields)


def has_fields(file: Path, fields: Collection[str]) -> bool:
    """Whether a file is a JSON object with these fields."""
    try:
        data = parse_json(file.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and data.keys() >= set(fields)


def check_written_file(file: Path, is_own: bool) -> None:
    """Check that a file that is to be written can be, and replaces none but one of diffquant's.

    Args:
        is_own: whether what is there is known to be one.

    Raises:
        OutputExistsError: it is somebody else's.
        UsageError: nothing can be written there.
    """
    check_writable(file.absolute().parent)
    check_replaced(file.absolute().parent, [file.name] if os.path.lexists(file) else [], [file.name] if is_own else [])
