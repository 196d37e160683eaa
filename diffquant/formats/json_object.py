"""JSON objects of a checkpoint's or an export's folder. No torch."""

from pathlib import Path
from typing import Any

from diffquant.errors import CheckpointError
from diffquant.support.files import check_plain
from diffquant.support.plain_data import parse_json

# As many bytes as the header of a safetensors file may have.
_LARGEST = 100_000_000
# How a message goes on about a file that Git LFS has not fetched yet, and what such a file begins with.
POINTER = "is a pointer of Git LFS and not the file itself, which `git lfs pull` fetches"
_BEGINS = b"version https://git-lfs"


def is_pointer(content: bytes | memoryview) -> bool:
    """Whether a file's content, of which the first bytes are enough, is a pointer of Git LFS."""
    return bytes(content[: len(_BEGINS)]) == _BEGINS


def holds_pointer(file: Path) -> bool:
    """Whether a file is a pointer of Git LFS; one that cannot be read counts as none."""
    try:
        with file.open("rb") as stream:
            return is_pointer(stream.read(len(_BEGINS)))
    except OSError:
        return False


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: the file is absent, or does not hold a JSON object.
    """
    try:
        check_plain(path)
        if path.stat().st_size > _LARGEST:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, and at most {_LARGEST} are read")
        content = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}; a checkpoint folder needs one") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is no text in UTF-8; fetch it again") from error
    except (OSError, ValueError) as error:
        if path.is_file() and not path.stat().st_size:
            raise CheckpointError(f"{path} is empty; fetch it again") from error
        if path.is_file() and holds_pointer(path):
            raise CheckpointError(f"{path} {POINTER}") from error
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content
