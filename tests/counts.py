"""How large the house is: python -m tests.counts [CHECKOUT], with --rooms room by room, or with --frames how deep its
calls go.

Counts read the syntax trees of every Python file of a checkout, also of an older one. Frames are this checkout's own
functions between the command line and the deepest operation of torch, for a sweep and an export of a pocket model.
"""

import ast
import contextlib
import io
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

HOUSE = Path(__file__).resolve().parent.parent
ROOMS = ("diffquant", "export", "calib", "bench", "research", "studies", "examples")
# Part of the research that checks, as tests do.
CHECKS = ("research/tests",)
PRODUCT = ("diffquant", "export", "calib", "bench")
TABLE = Path(__file__).with_name("counts.csv")
COLUMNS = ("code", "files", "classes", "records")
RECORDS = ("dataclass", "NamedTuple", "TypedDict", "attrs", "define", "frozen")


def files(checkout: Path, room: str) -> list[Path]:
    """The Python files that git tracks in a room; none of a linked room, whose files are counted where they are."""
    kinds = [f":(exclude){part}" for part in CHECKS] if room == "research" else CHECKS if room == "tests" else ()
    places = [f"{place}/*.py" if not place.startswith(":") else place for place in (room, *kinds)]
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--", *places], cwd=checkout, check=True, capture_output=True, text=True
    )
    return [checkout / name for name in tracked.stdout.split("\0") if name and (checkout / name).is_file()]


def docstrings(tree: ast.Module) -> Iterator[ast.Expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                yield first


def is_record(node: ast.ClassDef) -> bool:
    return any(name in ast.unparse(part) for part in [*node.decorator_list, *node.bases] for name in RECORDS)


def rooms(checkout: Path) -> dict[str, Counter[str]]:
    """Count each room of the product: the folders of diffquant/, its own files, and the three folders at the top."""
    places: dict[str, list[Path]] = {}
    for top in PRODUCT:
        for path in files(checkout, top):
            parts = path.relative_to(checkout).parts
            room = "/".join(parts[:2]) if top == "diffquant" and len(parts) > 2 else top
            places.setdefault(room, []).append(path)
    return {room: count(paths) for room, paths in sorted(places.items())}


def count(paths: list[Path]) -> Counter[str]:
    total: Counter[str] = Counter()
    for path in paths:
        text = path.read_text()
        tree = ast.parse(text)
        lines = text.splitlines()
        in_docstrings = {
            line for doc in docstrings(tree) for line in range(doc.lineno, (doc.end_lineno or doc.lineno) + 1)
        }
        outside = [line.strip() for number, line in enumerate(lines, 1) if number not in in_docstrings]
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        total += Counter(
            files=1,
            lines=len(lines),
            code=sum(1 for line in outside if line and not line.startswith("#")),
            docstrings=len(in_docstrings),
            classes=len(classes),
            records=sum(map(is_record, classes)),
        )
    return total


def print_counts(checkout: Path) -> None:
    columns = ("files", "lines", "code", "docstrings", "classes", "records")
    rows = {room: count(files(checkout, room)) for room in (*ROOMS, "tests")}
    rows["without tests"] = sum((rows[room] for room in ROOMS), Counter())
    print(f"{'':14}" + "".join(f"{column:>12}" for column in columns))
    for room, row in rows.items():
        print(f"{room:14}" + "".join(f"{row[column]:12,}" for column in columns))
    size = subprocess.run(["git", "ls-files", "-s"], cwd=checkout, check=True, capture_output=True, text=True).stdout
    names = [line.partition("\t")[2] for line in size.splitlines()]
    total = sum(os.lstat(checkout / name).st_size for name in names if os.path.lexists(checkout / name))
    print(f"{len(names):,} tracked files, {total / 1e6:.1f} MB")


class Depth:
    """The deepest stack of own frames below which an operation of torch was called."""

    def __init__(self) -> None:
        self.deepest: list[str] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "c_call" or not _of_torch(argument):
            return
        own: list[str] = []
        at: FrameType | None = frame
        while at is not None:
            code = at.f_code
            if code.co_name == "<module>" and Path(code.co_filename) != Path(__file__):
                return  # an import
            # Before Python 3.12 a list comprehension has a frame.
            if _is_own(code.co_filename) and code.co_name != "<listcomp>":
                own.append(f"{os.path.relpath(os.path.realpath(code.co_filename), HOUSE)} {code.co_name}")
            at = at.f_back
        if len(own) > len(self.deepest):
            self.deepest = own[::-1]


def _of_torch(function: Any) -> bool:
    module = getattr(function, "__module__", None)
    return (isinstance(module, str) and module.startswith("torch")) or "Tensor" in type(
        getattr(function, "__self__", None)
    ).__name__


def _is_own(name: str) -> bool:
    path = os.path.realpath(name)
    return any(path.startswith(f"{HOUSE / room}{os.sep}") for room in ROOMS)


def frames(arguments: list[str]) -> list[str]:
    """The own frames of `diffquant ARGUMENTS`, outermost first."""
    from diffquant.__main__ import main

    depth = Depth()
    sys.argv = ["diffquant", *arguments]
    threading.setprofile(depth)
    sys.setprofile(depth)
    try:
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
            main()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return depth.deepest


def print_frames() -> None:
    model = str(HOUSE / "diffquant/data/pocket/prose-diff-v2")
    with tempfile.TemporaryDirectory() as folder:
        sweep = f"sweep {model} --task perplexity --bits 4 --characters 4000 -o {folder}/sweep"
        for command in (sweep, f"export {model} -o {folder}/export"):
            walk = frames(command.split())
            print(f"{command.split()[0]}: {len(walk)} frames", *walk, sep="\n  ")


def print_rooms() -> None:
    print("room", *COLUMNS, sep=",")
    for room, row in rooms(HOUSE).items():
        print(room, *(row[column] for column in COLUMNS), sep=",")


if __name__ == "__main__":
    if sys.argv[1:] == ["--frames"]:
        print_frames()
    elif sys.argv[1:] == ["--rooms"]:
        print_rooms()
    else:
        print_counts(Path(sys.argv[1]) if sys.argv[1:] else HOUSE)
