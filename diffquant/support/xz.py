"""Compressed results: NAME.xz may stand in for NAME, and readers open either."""

import lzma
from pathlib import Path


def stored(file: Path) -> Path:
    """The file, or NAME.xz if only that exists."""
    compressed = file.with_name(f"{file.name}.xz")
    return compressed if compressed.is_file() and not file.exists() else file


def read_text(file: Path) -> str:
    """The text of a file, or of its NAME.xz if only that exists.

    Raises:
        OSError: neither can be read.
        ValueError: it is not UTF-8, or damaged.
    """
    there = stored(file)
    data = there.read_bytes()
    try:
        return (lzma.decompress(data) if there.suffix == ".xz" else data).decode()
    except lzma.LZMAError as error:
        raise ValueError(f"{there} is damaged: {error}") from error


def named(folder: Path, pattern: str) -> list[Path]:
    """Sorted files of a folder whose names match a pattern; a compressed one by its name without .xz."""
    found = {file.with_suffix("") if file.suffix == ".xz" else file for file in folder.glob(f"{pattern}*")}
    return sorted(file for file in found if file.match(pattern))
