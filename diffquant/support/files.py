"""Files that are written whole or not at all, and digests that tell files apart."""

import hashlib
import json
import os
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path

from diffquant.errors import UsageError


def check_writable(folder: Path) -> None:
    """Check, before the work, that files can be written into a folder, or the folder made; nothing is left.

    Raises:
        UsageError: they cannot.
    """
    nearest = next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(place))
    try:
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise UsageError(f"cannot write into {folder}: {error.strerror}; choose another output") from error


def check_distinct(paths: Sequence[Path]) -> None:
    """Check that no file or folder is named twice.

    Raises:
        UsageError: some are; they are listed.
    """
    names = [path.resolve() for path in paths]
    twice = sorted({str(name) for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(f"named twice: {', '.join(twice)}")


def file_digest(file: Path) -> str:
    """SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_atomically(file: Path, content: str | bytes) -> None:
    """Write a file whole or not at all; text is written as UTF-8."""
    # A name of its own: two processes may write the same file at once, and the last one stays.
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(file: Path, value: object) -> None:
    """Write plain data for people and programs to read, whole or not at all, in a folder that is made if need be."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(value, indent=1, ensure_ascii=False) + "\n")
