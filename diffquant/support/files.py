"""Writes files atomically, and computes their digests."""

import errno
import hashlib
import json
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from diffquant.errors import UsageError
from diffquant.support.listing import repeated

try:
    import fcntl
except ImportError:  # Windows, which removes no file that is open, and has no locks that fit
    fcntl = None  # type: ignore[assignment]

_TEMPORARY = ".diffquant.tmp"
# What a shell gives a command for `<(...)` is open already, so that reading it ends.
_DESCRIPTORS = (Path("/dev/fd"), Path("/proc/self/fd"))
_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def check_plain(file: Path) -> None:
    """Check that a path leads to a plain file: a pipe without a writer never opens, and a device may never end.

    Raises:
        OSError: it leads to something else, or nowhere.
    """
    kind = stat.S_IFMT(file.stat().st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    if kind != stat.S_IFREG and file != Path("/dev/stdin") and file.parent not in _DESCRIPTORS:
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'something else')} and not a plain file", str(file))


def check_plain_inside(folder: Path) -> None:
    """Check that a folder holds no pipe, socket or device, which whoever opens the folder's files would wait for.

    Raises:
        OSError: it does; the first one is named.
    """
    for file in sorted(folder.iterdir()):
        with suppress(FileNotFoundError, IsADirectoryError):
            check_plain(file)


def read_bytes(file: Path) -> bytes:
    """The content of a plain file.

    Raises:
        OSError: it cannot be read, or is a pipe, socket or device.
    """
    check_plain(file)
    return file.read_bytes()


def read_text(file: Path, encoding: str = "utf-8") -> str:
    """The text of a plain file.

    Raises:
        OSError: it cannot be read, or is a pipe, socket or device.
        UnicodeDecodeError: it is not in this encoding.
    """
    check_plain(file)
    return file.read_text(encoding=encoding)


def set_folder_aside(path: Path) -> None:
    """Rename a folder that lies where a file belongs."""
    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name(f"{path.name}.folder-{secrets.token_hex(4)}"))


def check_writable(folder: Path) -> None:
    """Check before the work that a folder can be written or created; leaves nothing behind.

    Raises:
        UsageError: they cannot.
    """
    nearest = next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(place))
    try:
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise UsageError(f"cannot write into {folder}: {error.strerror}; choose another output") from error


def cache_folder() -> Path:
    """This user's cache folder, which may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "diffquant"


def check_distinct(paths: Sequence[Path]) -> None:
    """Check that no file or folder is named twice.

    Raises:
        UsageError: some are; they are listed.
    """
    names = [path.resolve() for path in paths]
    if twice := sorted(map(str, repeated(names))):
        raise UsageError(f"named twice: {', '.join(twice)}")


def file_digest(file: Path) -> str:
    """SHA-256 of a file."""
    check_plain(file)
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_atomically(file: Path, content: str | bytes) -> None:
    """Write a file atomically, text as UTF-8, and remove temporary files that killed runs left of it."""
    data = content.encode() if isinstance(content, str) else content
    _remove_left(file)
    while True:
        # A unique name: two processes may write the same file at once, and the last one wins.
        temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}{_TEMPORARY}")
        try:
            with _held(temporary):
                temporary.write_bytes(data)
                os.replace(temporary, file)
            return
        except FileNotFoundError:
            # On a shared disk without locks, another machine may have removed it as a leftover.
            if not file.parent.is_dir():
                raise
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def _held(temporary: Path) -> Iterator[None]:
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


def _remove_left(file: Path) -> None:
    """Remove a file's temporary files that no process holds, left by killed runs."""
    if fcntl is None:
        return
    name = re.compile(rf"\.{re.escape(file.name)}\.[0-9a-f]{{8}}{re.escape(_TEMPORARY)}")
    with suppress(OSError), os.scandir(file.parent) as entries:
        for entry in entries:
            if name.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                _remove_unheld(entry.path)


def _remove_unheld(path: str) -> None:
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
