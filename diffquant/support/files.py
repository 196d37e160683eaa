"""Writes files atomically or from several threads, and reads only regular files, which may be compressed."""

import errno
import gzip
import hashlib
import json
import lzma
import os
import re
import secrets
import stat
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, cast

from diffquant.errors import UsageError
from diffquant.support.names import find_duplicates

try:
    import fcntl
except ImportError:  # Windows, which cannot remove an open file and has no suitable locks
    fcntl = None  # type: ignore[assignment]

_TEMPORARY = ".diffquant.tmp"
# For `<(...)` a shell passes the path of an open descriptor, which can be read to its end.
_DESCRIPTORS = (Path("/dev/fd"), Path("/proc/self/fd"))
_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def check_regular_file(file: Path) -> None:
    """Check that a path leads to a regular file, since opening a pipe may block, and reading a device may never end.

    Standard input is accepted, whatever it is.

    Raises:
        OSError: the path does not exist, or leads to a folder, pipe, socket or device.
    """
    kind = stat.S_IFMT(file.stat().st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    if kind != stat.S_IFREG and file != Path("/dev/stdin") and file.parent not in _DESCRIPTORS:
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'something else')}, not a plain file", str(file))


def check_no_special_files(folder: Path) -> None:
    """Check that a folder holds no pipe, socket or device, since opening one may block.

    Raises:
        OSError: it holds one; the message names the first.
    """
    for file in sorted(folder.iterdir()):
        try:
            check_regular_file(file)
        except OSError as error:
            # Broken and circular links do not block; opening one reports it.
            if error.errno not in (errno.ENOENT, errno.EISDIR, errno.ELOOP):
                raise


def read_bytes(file: Path) -> bytes:
    """Read the content of a regular file.

    Raises:
        OSError: it cannot be read, or is a pipe, socket or device.
    """
    check_regular_file(file)
    return file.read_bytes()


def read_text(file: Path, encoding: str = "utf-8") -> str:
    """Read the text of a regular file.

    Raises:
        OSError: it cannot be read, or is a pipe, socket or device.
        UnicodeDecodeError: it is not in this encoding.
    """
    check_regular_file(file)
    return file.read_text(encoding=encoding)


def set_folder_aside(path: Path) -> None:
    """If a path is a folder, rename it to PATH.folder-XXXXXXXX, so that a file can be written there."""
    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name(f"{path.name}.folder-{secrets.token_hex(4)}"))


def check_writable(folder: Path) -> None:
    """Check in advance that a folder can be created, or written if it exists; nothing is created.

    Raises:
        UsageError: the system does not allow it.
    """
    nearest = next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(place))
    try:
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise UsageError(f"cannot write into {folder}: {error.strerror}; choose another output") from error


def check_distinct(paths: Sequence[Path]) -> None:
    """Check that no file or folder is given twice.

    Raises:
        UsageError: a path is given twice; the message lists all such paths.
    """
    names = [path.resolve() for path in paths]
    if twice := sorted(map(str, find_duplicates(names))):
        raise UsageError(f"the same path is given twice: {', '.join(twice)}")


def file_digest(file: Path, algorithm: str | Callable[[], Any] = "sha256") -> str:
    """Return the digest of a regular file, as hex."""
    check_regular_file(file)
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, algorithm).hexdigest()


def write_atomically(file: Path, content: str | bytes) -> None:
    """Write a file atomically, text as UTF-8, and remove temporary files that killed runs left behind."""
    data = content.encode() if isinstance(content, str) else content
    while True:
        try:
            with replace_atomically(file) as temporary:
                temporary.write_bytes(data)
            return
        except FileNotFoundError:
            # On a shared disk without locks, another machine may have removed it as a leftover.
            if not file.parent.is_dir():
                raise


@contextmanager
def replace_atomically(file: Path) -> Iterator[Path]:
    """Yield the path of an empty file, which replaces `file` if the body succeeds and is removed otherwise."""
    _remove_leftovers(file)
    # A unique name: two processes may write the same file at once, and the last one wins.
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}{_TEMPORARY}")
    try:
        with _hold_lock(temporary):
            yield temporary
            os.replace(temporary, file)
    except OSError as error:
        # The system does not name an open file, for instance on a full disk.
        error.filename = error.filename or str(file)
        raise
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _hold_lock(temporary: Path) -> Iterator[None]:
    """Hold a lock on a new file; the system releases it however this process ends."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        # Without locks a file counts as in use forever.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _remove_leftovers(file: Path) -> None:
    """Remove a file's temporary files that killed runs left behind and no process holds."""
    if fcntl is None:
        return
    name = re.compile(rf"\.{re.escape(file.name)}\.[0-9a-f]{{8}}{re.escape(_TEMPORARY)}")
    with suppress(OSError), os.scandir(file.parent) as entries:
        for entry in entries:
            if name.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                _remove_unlocked(entry.path)


def _remove_unlocked(path: str) -> None:
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        finally:
            os.close(descriptor)


def write_json(file: Path, value: object) -> None:
    """Write plain data as readable JSON, atomically, and create the folder if needed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


class PreallocatedFile:
    """A new file of known size into which threads write at given offsets."""

    def __init__(self, path: Path, nbytes: int) -> None:
        # Windows would otherwise write two bytes for each line feed.
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)
        self._descriptor = os.open(path, flags, 0o644)
        self._guard = threading.Lock()
        try:
            os.ftruncate(self._descriptor, nbytes)
        except OSError:
            self.close()
            raise

    def put(self, data: memoryview, offset: int) -> None:
        """Write bytes at an offset."""
        while data:
            written = self._write(data, offset)
            data, offset = data[written:], offset + written

    def sync(self) -> None:
        """Wait until all bytes are on the disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)

    def _write(self, data: memoryview, offset: int) -> int:
        if hasattr(os, "pwrite"):
            return os.pwrite(self._descriptor, data, offset)
        # Windows needs two calls, seek and write, and no other thread may move the position in between.
        with self._guard:
            os.lseek(self._descriptor, offset, os.SEEK_SET)
            return os.write(self._descriptor, data)


def sync_to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's list of files, is on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open a folder as a file, and writes its entries itself.
    # Windows cannot sync a file that is open only for reading.
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# HellaSwag's largest file has 48 MB and a large sweep some megabytes; a few megabytes of gzip or xz can hold gigabytes.
LARGEST = 1 << 28
_GZIP, _XZ = b"\x1f\x8b", b"\xfd7zXZ\x00"


def find_file_or_xz(file: Path) -> Path:
    """Return the file, or NAME.xz if only that exists."""
    compressed = file.with_name(f"{file.name}.xz")
    return compressed if compressed.is_file() and not file.exists() else file


def read_text_or_xz(file: Path) -> str:
    """Read the text of a file, or of its NAME.xz if only that exists.

    Raises:
        OSError: neither can be read.
        ValueError: it is not UTF-8, damaged, or compressed and larger than 256 MiB.
    """
    there = find_file_or_xz(file)
    return (read_decompressed(there) if there.suffix == ".xz" else read_bytes(there)).decode()


def read_decompressed(file: Path) -> bytes:
    """Read a file, decompressed if it begins as gzip or xz do.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, or larger than 256 MiB.
    """
    check_regular_file(file)
    with file.open("rb") as packed:
        start = packed.peek(len(_XZ))
        try:
            with _open_expanded(packed, start, file.suffix) as stream:
                content = stream.read(LARGEST + 1)
        except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
            raise ValueError(f"{file} is damaged: {error}") from error
    if len(content) > LARGEST:
        raise ValueError(f"{file} holds more than the limit of {LARGEST >> 20} MiB")
    return content


def _open_expanded(packed: BufferedReader, start: bytes, suffix: str) -> BinaryIO:
    if start.startswith(_GZIP):
        return cast(BinaryIO, gzip.GzipFile(fileobj=packed))
    return cast(BinaryIO, lzma.LZMAFile(packed) if start.startswith(_XZ) or suffix == ".xz" else packed)


def list_matching_files(folder: Path, pattern: str) -> list[Path]:
    """List a folder's files whose names match a pattern, sorted.

    A file NAME.xz matches if NAME does, and is listed as NAME.
    """
    found = {file.with_suffix("") if file.suffix == ".xz" else file for file in folder.glob(f"{pattern}*")}
    return sorted(file for file in found if file.match(pattern))
