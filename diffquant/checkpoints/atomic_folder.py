"""Writes a destination folder atomically, and never replaces anything that diffquant did not write."""

import errno
import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diffquant.checkpoints.side_files import read_json
from diffquant.checkpoints.staging import (
    Staging,
    has_leftovers,
    hidden_sibling,
    lock_output,
    partial_folder,
    remove_leftovers,
)
from diffquant.errors import CheckpointError, DiffQuantError, OutputExistsError, UsageError
from diffquant.support.files import check_writable, write_atomically
from diffquant.support.names import option_name
from diffquant.support.outputs import check_replaceable

# Name of an output's record; `overwrite` may replace only the files that it lists under "files".
RECORD = "diffquant.json"
# Bytes reserved for the tokenizer and metadata, whose size is not known in advance.
_MARGIN = 16 * 2**20


@contextmanager
def stage_output(destination: Path, key: Mapping[str, Any], nbytes: int, overwrite: bool) -> Iterator[Staging]:
    """Open a context that builds an output in a partial folder, which becomes `destination` if no error occurs.

    Args:
        destination: folder to make; an existing one is replaced only at the end.
        key: plain data that determines the output; finished shards are reused under the same key.
        nbytes: size of the output in bytes.
        overwrite: whether an existing output of diffquant may be replaced.

    Raises:
        OutputExistsError: the destination exists and `overwrite` is false, or has files that diffquant did not write.
        DiffQuantError: the disk is too full, before or during the work, or another run writes the same output.
        KeyboardInterrupt: the work was interrupted; the message says what is kept and how to resume.
    """
    _check_space(destination, nbytes)
    partial = partial_folder(destination)
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        with lock_output(destination):
            _restore(destination)
            _check_destination(destination, overwrite)
            staging = Staging(destination, key)
            try:
                yield staging
                staging.remove_kept()
                _write_record(staging.folder, _files_in(staging.folder) | {RECORD})
                staging.sync()
                _put_in_place(partial, destination)
            except OSError:
                # Keep finished files: the user can free disk space and resume.
                raise
            except KeyboardInterrupt:
                if not (count := staging.finished_count()):
                    # Without finished files, as in an export, another run has nothing to resume from.
                    staging.discard()
                    raise KeyboardInterrupt("interrupted; the partial output was removed") from None
                raise KeyboardInterrupt(
                    f"interrupted; {count} finished files are kept in {partial}: run the same command again to resume"
                ) from None
            except Exception as error:
                if not staging.has_kept_tensors():
                    staging.discard()
                elif isinstance(error, DiffQuantError):
                    error.args = (f"{error}; finished layers are kept in {partial}: the same command continues there",)
                raise
            remove_leftovers(destination)
    except OSError as error:
        raise _write_error(error, destination, nbytes) from error


def check_output(source: Path, destination: Path, overwrite: bool) -> None:
    """Check, before the source is opened, that an output can be written and may replace an existing destination.

    Raises:
        UsageError: source and destination overlap, or nothing can be written there.
        OutputExistsError: the destination exists and `overwrite` is false, or has files that diffquant did not write.
        DiffQuantError: another run is writing the same output.
    """
    input_path, output_path = source.resolve(), destination.resolve()
    if input_path == output_path or output_path in input_path.parents or input_path in output_path.parents:
        raise UsageError(f"the output {destination} overlaps the input {source}; choose a separate folder")
    check_writable(output_path.parent)
    if hidden_sibling(destination, "replaced").is_dir() or has_leftovers(destination):
        with lock_output(destination):
            _restore(destination)
    _check_destination(destination, overwrite)


def _check_destination(destination: Path, overwrite: bool) -> None:
    if not os.path.lexists(destination):
        return
    # Checked first, since `overwrite` does not help here.
    if not destination.is_dir() or destination.is_symlink():
        raise OutputExistsError(
            f"{destination} exists and is not a folder, so it is not overwritten; choose another output"
        )
    if not overwrite:
        raise OutputExistsError(f"{destination} exists; choose another output or pass {option_name('overwrite', True)}")
    check_replaceable(destination, _files_in(destination), _recorded_files(destination))


def _recorded_files(folder: Path) -> set[str]:
    """Return the names of the files that diffquant's record of a folder lists; empty without a record."""
    try:
        names = read_json(folder / RECORD).get("files", [])
    except CheckpointError:
        return set()
    if not isinstance(names, list):
        return set()
    return {name for name in names if isinstance(name, str) and (folder / name).is_file()}


def add_to_record(folder: Path, files: Iterable[Path]) -> None:
    """Add files to the record in an output folder, if there is one, so that `overwrite` may replace them."""
    if recorded := _recorded_files(folder):
        _write_record(folder, recorded | {file.relative_to(folder).as_posix() for file in files})


def _write_record(folder: Path, names: Collection[str]) -> None:
    """List an output's files in its record, which keeps what else it has."""
    record = read_json(folder / RECORD) if (folder / RECORD).exists() else {}
    write_atomically(folder / RECORD, json.dumps({**record, "files": sorted(names)}, indent=2) + "\n")


def _files_in(folder: Path) -> set[str]:
    """Return the paths of all files and empty folders below a folder."""
    return {
        file.relative_to(folder).as_posix()
        for file in folder.rglob("*")
        if file.is_symlink() or not file.is_dir() or not any(file.iterdir())
    }


def _check_space(destination: Path, nbytes: int) -> None:
    """Check that the disk can hold the output.

    Raises:
        DiffQuantError: it cannot; the message gives the bytes needed, kept and free.
    """
    partial = partial_folder(destination)
    written = sum(_allocated_bytes(file) for file in partial.iterdir()) if partial.is_dir() else 0
    available = _free_bytes(destination) + written
    if nbytes + _MARGIN > available:
        raise DiffQuantError(
            f"{destination} needs {nbytes:,} bytes for its weights and {_MARGIN:,} for other files, but "
            f"only {available:,} are free there; make room or choose another disk"
        )


def _allocated_bytes(file: Path) -> int:
    """Return the bytes of the disk that a file takes: fewer than its size while most of it is unwritten."""
    status = file.stat()
    return status.st_blocks * 512 if hasattr(status, "st_blocks") else status.st_size  # Windows has no blocks


def _put_in_place(partial: Path, destination: Path) -> None:
    replaced = hidden_sibling(destination, "replaced")
    if destination.exists():
        os.rename(destination, replaced)
    os.replace(partial, destination)
    shutil.rmtree(replaced, ignore_errors=True)


def _restore(destination: Path) -> None:
    """Restore the old output if a run died while replacing it, and finish its pending removals."""
    remove_leftovers(destination)
    replaced = hidden_sibling(destination, "replaced")
    if not replaced.is_dir():
        return
    if destination.exists():
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        os.rename(replaced, destination)


def _free_bytes(destination: Path) -> int:
    place = destination.absolute().parent
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _write_error(error: OSError, destination: Path, nbytes: int) -> DiffQuantError:
    partial = partial_folder(destination)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = _free_bytes(destination)
        # A quota or the number of files may be exhausted even if bytes are free.
        limit = "" if free < nbytes else f"; {os.strerror(error.errno)}, so check quotas and the number of files too"
        return DiffQuantError(
            f"the disk is full: {destination} needs {nbytes:,} bytes and {free:,} are free{limit}; "
            f"finished files are kept in {partial}: make room and run the same command again to resume"
        )
    return DiffQuantError(f"writing {destination} failed: {error}; finished files, if any, are kept in {partial}")
