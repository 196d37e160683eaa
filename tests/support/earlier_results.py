"""Results of diffquant's own runs as some day wrote them, which reports, comparisons and readers have to take."""

import lzma
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Those that no page of results is rendered from any more, and the others.
FOLDERS = (ROOT / "tests" / "recorded", ROOT / "research" / "results")
SWEEPS = [
    f"{name}/sweep.json" for name in ("pocket-needle-lengths", "pocket-nll", "smollm2-logits-500", "smollm2-logits-kl")
]


def recorded(name: str) -> str:
    """The text of a recorded file, such as pocket-nll/sweep.json."""
    file = next(folder / f"{name}.xz" for folder in FOLDERS if (folder / f"{name}.xz").exists())
    return lzma.decompress(file.read_bytes()).decode()


def write_recorded(name: str, file: Path) -> Path:
    """Write a recorded file where a command finds it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(recorded(name), encoding="utf-8")
    return file
