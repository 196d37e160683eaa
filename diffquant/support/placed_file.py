"""A file that several threads write in any order."""

import os
import threading
from pathlib import Path
from types import TracebackType


class PlacedFile:
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

    def __enter__(self) -> "PlacedFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, data: memoryview, offset: int) -> int:
        if hasattr(os, "pwrite"):
            return os.pwrite(self._descriptor, data, offset)
        # Windows needs two calls, seek and write, and no other thread may move the position in between.
        with self._guard:
            os.lseek(self._descriptor, offset, os.SEEK_SET)
            return os.write(self._descriptor, data)


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folder as a file, and writes its entries by itself.
    # Windows syncs no file that is open for reading alone.
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
