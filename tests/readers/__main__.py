"""Prints which reader decodes torch's tokens of which folder: docs/onnx.md's table.

`make test-all ONLY=readers` installs the readers."""

import sys
import tempfile
from pathlib import Path

from tests.readers.folders import FEATURES, Folder
from tests.readers.readers import READERS


def _mark(folder: Folder, answer: list[int] | str) -> str:
    if isinstance(answer, str):
        print(answer, file=sys.stderr)
        return "no"
    return "yes" if answer == folder.tokens else "other tokens"


def _main() -> None:
    with tempfile.TemporaryDirectory() as root:
        folders = {name: Folder(Path(root), name) for name in FEATURES}
        columns = {}
        for name, reader in READERS.items():
            asked = folders if reader.program else {n: f for n, f in folders.items() if reader.reads(f)}
            version, answers = reader.answers(asked)
            title = name if version in name else f"{name} {version}"
            columns[title] = [_mark(folders[n], answers[n]) if n in answers else "no" for n in FEATURES]
        print(" | ".join(["", "folder", *columns]).strip(), "|")
        print("|---" * (len(columns) + 1) + "|")
        for row, name in enumerate(FEATURES):
            print("|", " | ".join([name, *(marks[row] for marks in columns.values())]), "|")


_main()
