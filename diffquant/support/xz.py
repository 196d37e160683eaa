"""Results that are kept compressed: NAME.xz stands in the place of NAME, and what reads the one reads the other."""

import lzma
from pathlib import Path


def stored(file: Path) -> Path:
    """The file, or NAME.xz where only that is there."""
    compressed = file.with_name(f"{file.name}.xz")
    return compressed if compressed.is_file() and not file.exists() else file


def read_text(file: Path) -> str:
    """The text of a file or, where only that is there, of its NAME.xz.

    Raises:
        OSError: neither can be read.
        ValueError: it is no UTF-8, or damaged.
    """
    there = stored(file)
    data = there.read_bytes()
    try:
        return (lzma.decompress(data) if there.suffix == ".xz" else data).decode()
    except lzma.LZMAError as error:
        raise ValueError(f"{there} is damaged: {error}") from error


def named(folder: Path, pattern: str) -> list[Path]:
    """Files of a folder whose names match a pattern, in their order; a compressed one by the name it had before."""
    found = {file.with_suffix("") if file.suffix == ".xz" else file for file in folder.glob(f"{pattern}*")}
    return sorted(file for file in found if file.match(pattern))
