"""Compressed results: NAME.xz may stand in for NAME, and readers open either."""

import gzip
import lzma
import zlib
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, cast

from diffquant.support.files import check_plain, read_bytes

# HellaSwag's largest file has 48 MB and a large sweep some megabytes; a few megabytes of gzip or xz can hold gigabytes.
LARGEST = 1 << 28
_GZIP, _XZ = b"\x1f\x8b", b"\xfd7zXZ\x00"


def stored(file: Path) -> Path:
    """The file, or NAME.xz if only that exists."""
    compressed = file.with_name(f"{file.name}.xz")
    return compressed if compressed.is_file() and not file.exists() else file


def read_text(file: Path) -> str:
    """The text of a file, or of its NAME.xz if only that exists.

    Raises:
        OSError: neither can be read.
        ValueError: it is not UTF-8, damaged, or compressed and larger than 256 MiB.
    """
    there = stored(file)
    return (read_expanded(there) if there.suffix == ".xz" else read_bytes(there)).decode()


def read_expanded(file: Path) -> bytes:
    """The content of a file, decompressed if it begins as gzip or xz do.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, or larger than 256 MiB.
    """
    check_plain(file)
    with file.open("rb") as packed:
        start = packed.peek(len(_XZ))
        try:
            with _expanding(packed, start, file.suffix) as stream:
                content = stream.read(LARGEST + 1)
        except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
            raise ValueError(f"{file} is damaged: {error}") from error
    if len(content) > LARGEST:
        raise ValueError(f"{file} holds more than {LARGEST >> 20} MiB, the most that is read")
    return content


def _expanding(packed: BufferedReader, start: bytes, suffix: str) -> BinaryIO:
    if start.startswith(_GZIP):
        return cast(BinaryIO, gzip.GzipFile(fileobj=packed))
    return cast(BinaryIO, lzma.LZMAFile(packed) if start.startswith(_XZ) or suffix == ".xz" else packed)


def named(folder: Path, pattern: str) -> list[Path]:
    """Sorted files of a folder whose names match a pattern; a compressed one by its name without .xz."""
    found = {file.with_suffix("") if file.suffix == ".xz" else file for file in folder.glob(f"{pattern}*")}
    return sorted(file for file in found if file.match(pattern))
