"""What ships with the package to evaluate on: HellaSwag items (MIT) and public-domain prose."""

import gzip
import lzma
from importlib.resources import files

HELLASWAG = "hellaswag-1000.jsonl.gz"
BOOKS = "books.txt.xz"


def hellaswag_lines() -> list[str]:
    """1,000 HellaSwag validation items, one JSON object a line; the licence is in LICENSE-hellaswag.txt."""
    return gzip.decompress((files(__name__) / HELLASWAG).read_bytes()).decode().splitlines()


def books_text() -> str:
    """About 260,000 characters of English prose; what it is cut from is in LICENSE-books.txt."""
    return lzma.decompress((files(__name__) / BOOKS).read_bytes()).decode()
