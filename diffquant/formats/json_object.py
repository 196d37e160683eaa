"""JSON objects of a checkpoint's or an export's folder. No torch."""

from pathlib import Path
from typing import Any

from diffquant.errors import CheckpointError
from diffquant.support.files import check_plain
from diffquant.support.plain_data import parse_json

# As many bytes as the header of a safetensors file may have.
_LARGEST = 100_000_000


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
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content
