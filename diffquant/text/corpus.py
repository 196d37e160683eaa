"""Texts that models read: from a file, or the prose that ships."""

import hashlib
from pathlib import Path

from diffquant import data
from diffquant.errors import UsageError
from diffquant.formats.json_object import POINTER, is_pointer
from diffquant.support.files import read_text


def load_text(path: Path | None = None, characters: int | None = None) -> str:
    """The first `characters` of a UTF-8 text file, or of the prose that ships; all of them by default.

    Raises:
        UsageError: the file cannot be read or holds no text.
    """
    if path is None:
        return data.books_text()[:characters]
    try:
        text = read_text(path, "utf-8-sig")[:characters]
    except OSError as error:
        raise UsageError(f"cannot read text from {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no text in UTF-8 ({error}); convert it, with iconv for instance") from error
    if is_pointer(text[:100].encode()):
        raise UsageError(f"{path} {POINTER}")
    if not text.strip():
        raise UsageError(f"{path} is empty; give a text with prose in it")
    return text


def text_digest(text: str) -> str:
    """16 hex digits of the text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
