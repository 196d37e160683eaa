"""A destination folder that appears whole or not at all, and work on it that an interruption does not undo.

Work goes on in DESTINATION.partial. Its journal keeps the digest of each finished shard under a key
of everything that determines the output; a later run with the same key verifies and skips those shards.
"""

import errno
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from diffquant.errors import DiffQuantError, OutputExistsError, UsageError
from diffquant.support.files import file_digest, write_atomically

_JOURNAL = "journal.json"
_LOCK = ".lock"
# Bytes for the tokenizer and what describes the weights.
_MARGIN = 16 * 2**20


class Staging:
    """The partial folder of an output, and the journal of what is finished in it.

    Attributes:
        folder: folder in which the output grows.
        resumed: number of shards that an earlier run finished and that were verified.
    """

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        self.folder = folder
        self.resumed = 0
        self._key = json.loads(json.dumps(key))
        self._guard = threading.Lock()
        self._records = self._read_journal()
        if not self._records:
            self._clear()

    def finished(self, shard: str) -> dict[str, Any] | None:
        """The record of a shard, if its file is still what it was then."""
        record: dict[str, Any] | None = self._records.get(shard)
        file = self.folder / shard
        if record is None or not file.is_file() or file_digest(file) != record["sha256"]:
            return None
        self.resumed += 1
        return record

    def finish(self, shard: str, record: Mapping[str, Any]) -> dict[str, Any]:
        """Record a shard as done, with its digest."""
        # Here it overlaps with the next shard's work, at the end nothing would.
        _sync(self.folder / shard)
        entry = {"sha256": file_digest(self.folder / shard), **record}
        with self._guard:
            self._records[shard] = entry
            write_atomically(self.folder / _JOURNAL, json.dumps({"key": self._key, "shards": self._records}))
        return entry

    def finished_count(self) -> int:
        return len(self._records)

    def seal(self) -> None:
        """Leave only the output itself, and all of it on the disk."""
        for name in (_JOURNAL, _JOURNAL + ".tmp", _LOCK):
            (self.folder / name).unlink(missing_ok=True)
        for file in (*self.folder.iterdir(), self.folder):
            _sync(file)

    def _read_journal(self) -> dict[str, Any]:
        try:
            journal = json.loads((self.folder / _JOURNAL).read_text())
            return dict(journal["shards"]) if journal["key"] == self._key else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def _clear(self) -> None:
        for entry in self.folder.iterdir():
            if entry.name != _LOCK:
                entry.unlink()


@contextmanager
def staged(destination: Path, key: Mapping[str, Any], nbytes: int, overwrite: bool) -> Iterator[Staging]:
    """Build `destination` beside itself and put it in place when the body ends well.

    Args:
        destination: folder to make; an old one is replaced only at the end.
        key: plain data that determines the output; finished shards are reused under the same key.
        nbytes: size of the output.
        overwrite: whether an old checkpoint may be replaced.

    Raises:
        OutputExistsError: the destination exists and `overwrite` is false.
        DiffQuantError: the disk has no room, before or during the work, or another run writes the same output.
        KeyboardInterrupt: the body was interrupted; the message says how to resume.
    """
    partial = partial_folder(destination)
    _check_destination(destination, overwrite)
    _check_space(destination, nbytes)
    try:
        partial.mkdir(parents=True, exist_ok=True)
        if not (partial / _LOCK).exists() and any(partial.iterdir()):
            raise OutputExistsError(f"{partial} is needed for unfinished output and holds other files; move them away")
        with _locked(partial):
            staging = Staging(partial, key)
            yield from _guarded(staging)
            staging.seal()
            _put_in_place(partial, destination)
    except OSError as error:
        raise _write_error(error, destination, nbytes) from error


def partial_folder(destination: Path) -> Path:
    """The folder beside a destination in which it grows: DESTINATION.partial."""
    place = Path(os.path.abspath(destination))
    return place.with_name(place.name + ".partial")


def check_output(source: Path, destination: Path, overwrite: bool) -> None:
    """Check, before any work and before the source is opened, that an output destroys nothing.

    Raises:
        UsageError: source and destination overlap.
        OutputExistsError: the destination exists and `overwrite` is false, or it is no checkpoint.
    """
    input_path, output_path = source.resolve(), destination.resolve()
    if input_path == output_path or output_path in input_path.parents or input_path in output_path.parents:
        raise UsageError(f"the output {destination} overlaps the input {source}; choose a folder apart from it")
    _check_destination(destination, overwrite)


def _check_destination(destination: Path, overwrite: bool) -> None:
    _restore(destination)
    if not os.path.lexists(destination):
        return
    if not overwrite:
        raise OutputExistsError(f"{destination} exists; choose another output or pass --overwrite")
    is_folder = destination.is_dir() and not destination.is_symlink()
    if not is_folder or not ((destination / "config.json").is_file() or not any(destination.iterdir())):
        raise OutputExistsError(f"{destination} exists and is no checkpoint folder: it will not be overwritten")


def _check_space(destination: Path, nbytes: int) -> None:
    """Check that the disk can hold the output.

    Raises:
        DiffQuantError: it cannot; the bytes needed and free are named.
    """
    partial = partial_folder(destination)
    written = sum(file.stat().st_blocks * 512 for file in partial.iterdir()) if partial.is_dir() else 0
    available = _free_bytes(destination) + written
    if nbytes + _MARGIN > available:
        raise DiffQuantError(
            f"{destination} needs {nbytes} bytes and only {available} are free there; make room or choose another disk"
        )


def _guarded(staging: Staging) -> Iterator[Staging]:
    """Hand out the staging, which an error in the input removes and an interruption leaves."""
    try:
        yield staging
    except DiffQuantError:
        shutil.rmtree(staging.folder, ignore_errors=True)
        raise
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted; {staging.finished_count()} finished shards are kept in {staging.folder}: "
            "run the same command again to go on from there"
        ) from None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder against a second run; the lock ends with the process, however it ends."""
    # Not the soft lock that filelock falls back to: a file that a killed run leaves would block all later ones.
    lock = FileLock(folder / _LOCK, blocking=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        raise DiffQuantError(f"another run is writing {folder}; wait for it or choose another output") from None
    try:
        yield
    finally:
        lock.release()


def _put_in_place(partial: Path, destination: Path) -> None:
    replaced = _replaced_folder(destination)
    if destination.exists():
        os.rename(destination, replaced)
    os.replace(partial, destination)
    shutil.rmtree(replaced, ignore_errors=True)


def _restore(destination: Path) -> None:
    """Put back the old output if a run died in the moment of replacing it."""
    replaced = _replaced_folder(destination)
    if not replaced.is_dir():
        return
    if destination.exists():
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        os.rename(replaced, destination)


def _replaced_folder(destination: Path) -> Path:
    place = Path(os.path.abspath(destination))
    return place.with_name(f".{place.name}.diffquant-replaced")


def _free_bytes(destination: Path) -> int:
    place = destination.absolute().parent
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _write_error(error: OSError, destination: Path, nbytes: int) -> DiffQuantError:
    partial = partial_folder(destination)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiffQuantError(
            f"the disk is full: {destination} needs {nbytes} bytes and {_free_bytes(destination)} are free; "
            f"finished shards are kept in {partial}: make room and run the same command again to go on from there"
        )
    return DiffQuantError(f"writing {destination} failed: {error}; finished shards, if any, are kept in {partial}")


def _sync(path: Path) -> None:
    """Wait until a file's or folder's content is on the disk: a rename may otherwise outrun it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
