"""Work in progress on an output folder: what of it is finished, kept so that an interruption does not undo it.

The output grows in DESTINATION.partial. Beside that folder, so that the output never holds anything else, lie a journal
with the digest of each finished shard, under a key of everything that determines the output, and a lock.
"""

import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from diffquant.errors import DiffQuantError, OutputExistsError
from diffquant.support.digests import content_digest
from diffquant.support.files import read_text, set_folder_aside, write_atomically
from diffquant.support.placed_file import sync


class Staging:
    """The partial folder of an output, and the journal of what is finished in it.

    Args:
        destination: folder that the output becomes.
        key: plain data that determines the output; finished shards are reused under the same key.

    Raises:
        OutputExistsError: the partial folder holds files that no run of ours left.

    Attributes:
        folder: folder in which the output grows.
        resumed: number of shards that an earlier run finished and that were verified.
    """

    def __init__(self, destination: Path, key: Mapping[str, Any]) -> None:
        self.folder = partial_folder(destination)
        self.resumed = 0
        self._journal = _beside(destination, "journal")
        self._key = json.loads(json.dumps(key))
        self._guard = threading.Lock()
        if not self._journal.exists() and self.folder.is_dir() and any(self.folder.iterdir()):
            raise OutputExistsError(
                f"{self.folder} is needed for unfinished output and holds other files; move them away"
            )
        self._records = self._read_journal()
        self._write_journal()
        self.folder.mkdir(exist_ok=True)
        self._clear()

    def finished(self, shard: str) -> dict[str, Any] | None:
        """The record of a shard, if its file is still what it was then."""
        record: dict[str, Any] | None = self._records.get(shard)
        file = self.folder / shard
        if record is None or not file.is_file() or content_digest(file) != record["digest"]:
            return None
        self.resumed += 1
        return record

    def finish(self, shard: str, record: Mapping[str, Any]) -> dict[str, Any]:
        """Record a shard as done, with its "digest"."""
        # Here it overlaps with the next shard's work, at the end nothing would.
        sync(self.folder / shard)
        entry = {"digest": content_digest(self.folder / shard), **record}
        with self._guard:
            self._records[shard] = entry
            self._write_journal()
        return entry

    def finished_count(self) -> int:
        return len(self._records)

    def sync(self) -> None:
        """Wait until all of the output is on the disk: renaming it may otherwise outrun its content."""
        for file in (*self.folder.rglob("*"), self.folder):
            sync(file)

    def discard(self) -> None:
        """Remove all that was made."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._journal.unlink(missing_ok=True)

    def _read_journal(self) -> dict[str, Any]:
        try:
            journal = json.loads(read_text(self._journal))
            shards = journal["shards"] if journal["key"] == self._key else {}
            return {name: dict(record) for name, record in shards.items() if isinstance(record["digest"], str)}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}

    def _write_journal(self) -> None:
        set_folder_aside(self._journal)
        write_atomically(self._journal, json.dumps({"key": self._key, "shards": self._records}))

    def _clear(self) -> None:
        """Remove what is not a finished shard: what describes the output is written anew by every run."""
        for entry in self.folder.iterdir():
            if entry.name not in self._records:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


@contextmanager
def locked(destination: Path) -> Iterator[None]:
    """Hold an output against a second run; the lock ends with the process, however it ends.

    Raises:
        DiffQuantError: another run holds it.
    """
    file = _beside(destination, "lock")
    # Not the soft lock that filelock falls back to: a file that a killed run leaves would block all later ones.
    lock = FileLock(file, blocking=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise DiffQuantError(
            f"another run is writing {partial_folder(destination)}; wait for it or choose another output"
        ) from None
    try:
        yield
    finally:
        # While it is held: a run that opened it before finds that no name leads to it any more, and gives up.
        with suppress(PermissionError):
            file.unlink(missing_ok=True)
        lock.release()
        if os.name == "nt":  # which removes no file that is open, be it here before or now in another run
            with suppress(PermissionError):
                file.unlink(missing_ok=True)


def left_behind(destination: Path) -> bool:
    """Whether a run that died after its output was in place, or before it began, left a journal or a lock."""
    return not partial_folder(destination).exists() and any(
        _beside(destination, what).exists() for what in ("journal", "lock")
    )


def forget(destination: Path) -> None:
    """Remove the journal where it tells of no partial folder."""
    if not partial_folder(destination).exists():
        _beside(destination, "journal").unlink(missing_ok=True)


def partial_folder(destination: Path) -> Path:
    """The folder beside a destination in which it grows: DESTINATION.partial."""
    place = Path(os.path.abspath(destination))
    return place.with_name(place.name + ".partial")


def _beside(destination: Path, what: str) -> Path:
    place = Path(os.path.abspath(destination))
    return place.with_name(f".{place.name}.diffquant-{what}")
