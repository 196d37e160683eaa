"""Keeps the finished part of an output folder, so that an interrupted run can resume.

The output grows in DESTINATION.partial. A journal and a lock file are next to that folder, so that the output never
contains them. The journal has a key of everything that determines the output, and the digest of each finished shard.
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
from safetensors.torch import load_file, save_file
from torch import Tensor

from diffquant.errors import DiffQuantError, OutputExistsError
from diffquant.support.digests import content_digest
from diffquant.support.files import read_text, set_folder_aside, sync_to_disk, write_atomically

# Prefix of files of tensors that lead to the output and are not part of it.
_KEPT = "kept-"


class Staging:
    """The partial folder of an output, and the journal of its finished shards.

    Args:
        destination: folder that the output becomes.
        key: plain data that determines the output; finished shards are reused under the same key.

    Raises:
        OutputExistsError: the partial folder has files that no run of diffquant left.

    Attributes:
        folder: the partial folder, in which the output is built.
        resumed: number of shards that an earlier run finished and that were verified.
    """

    def __init__(self, destination: Path, key: Mapping[str, Any]) -> None:
        self.folder = partial_folder(destination)
        self.resumed = 0
        self._journal = hidden_sibling(destination, "journal")
        self._key = json.loads(json.dumps(key))
        self._guard = threading.Lock()
        if not self._journal.exists() and self.folder.is_dir() and any(self.folder.iterdir()):
            raise OutputExistsError(
                f"{self.folder} is needed for unfinished output, but contains other files; move them elsewhere"
            )
        self._records = self._read_journal()
        self._write_journal()
        self.folder.mkdir(exist_ok=True)
        self._clear()

    def find_finished(self, shard: str) -> dict[str, Any] | None:
        """Return the record of a shard that an earlier run finished, or None if there is none or its file changed."""
        record: dict[str, Any] | None = self._records.get(shard)
        file = self.folder / shard
        if record is None or not file.is_file() or content_digest(file) != record["digest"]:
            return None
        self.resumed += 1
        return record

    def record_finished(self, shard: str, record: Mapping[str, Any]) -> dict[str, Any]:
        """Record a shard as finished, and return its record, to which the "digest" of the file is added."""
        # Syncing here overlaps with the next shard's work.
        sync_to_disk(self.folder / shard)
        entry = {"digest": content_digest(self.folder / shard), **record}
        with self._guard:
            self._records[shard] = entry
            self._write_journal()
        return entry

    def keep_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep tensors that lead to the output, until it is complete."""
        save_file(dict(tensors), self.folder / f"{_KEPT}{name}")
        self.record_finished(f"{_KEPT}{name}", {})

    def find_kept(self, name: str) -> dict[str, Tensor] | None:
        """Return tensors that an earlier run kept, or None if there are none or their file changed."""
        found = self.find_finished(f"{_KEPT}{name}") is not None
        return load_file(self.folder / f"{_KEPT}{name}") if found else None

    def has_kept_tensors(self) -> bool:
        """Return whether tensors are kept, which took long to compute."""
        return any(name.startswith(_KEPT) for name in self._records)

    def remove_kept(self) -> None:
        """Remove the kept tensors, so that only the output is left."""
        for file in self.folder.glob(f"{_KEPT}*"):
            file.unlink()

    def finished_count(self) -> int:
        return len(self._records)

    def sync(self) -> None:
        """Wait until all of the output is on the disk, so that renaming cannot precede its content."""
        for file in (*self.folder.rglob("*"), self.folder):
            sync_to_disk(file)

    def discard(self) -> None:
        """Remove everything that was written."""
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
        """Remove everything except finished shards; every run writes the other files again."""
        for entry in self.folder.iterdir():
            if entry.name not in self._records:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


@contextmanager
def lock_output(destination: Path) -> Iterator[None]:
    """Lock an output against a second run; the lock ends with the process, however it ends.

    Raises:
        DiffQuantError: another run holds the lock.
    """
    file = hidden_sibling(destination, "lock")
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
        # Removed before the release: a run that has already opened the file finds that it was removed, and gives up.
        with suppress(PermissionError):
            file.unlink(missing_ok=True)
        lock.release()
        if os.name == "nt":  # which cannot remove an open file; this run or another one may have it open
            with suppress(PermissionError):
                file.unlink(missing_ok=True)


def has_leftovers(destination: Path) -> bool:
    """Return whether a run that died left a journal or a lock but no partial folder."""
    return not partial_folder(destination).exists() and any(
        hidden_sibling(destination, what).exists() for what in ("journal", "lock")
    )


def remove_leftovers(destination: Path) -> None:
    """Remove the journal of a destination if there is no partial folder."""
    if not partial_folder(destination).exists():
        hidden_sibling(destination, "journal").unlink(missing_ok=True)


def partial_folder(destination: Path) -> Path:
    """Return the folder in which a destination is built: DESTINATION.partial."""
    place = Path(os.path.abspath(destination))
    return place.with_name(place.name + ".partial")


def hidden_sibling(destination: Path, what: str) -> Path:
    """Return the path of a run's hidden file or folder next to a destination: .DESTINATION.diffquant-WHAT."""
    place = Path(os.path.abspath(destination))
    return place.with_name(f".{place.name}.diffquant-{what}")
