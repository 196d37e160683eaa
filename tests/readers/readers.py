"""The readers, each a program that is given folders' files and answers with the tokens it decodes."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.readers.folders import COUNT, Folder

HERE = Path(__file__).parent
_ENVIRONMENTS = HERE.parents[1] / "build/readers"
ONNXRUNTIMES = [line.split()[0] for line in (HERE / "onnxruntime.txt").read_text().splitlines()]


@dataclass(frozen=True)
class Reader:
    """A reader of ONNX.

    Attributes:
        name: what it is called.
        program: words that start it.
        needs: a file that is there where it is installed.
        path: Python packages that it takes before others.
    """

    name: str
    program: tuple[str, ...]
    needs: Path
    path: Path | None = None

    @property
    def is_there(self) -> bool:
        return self.needs.exists() and shutil.which(self.program[0]) is not None

    def reads(self, folder: Folder) -> bool:
        """Whether the reader claims the folder: a runtime has its floor."""
        if self.path is not None:
            return tuple(int(part) for part in self.path.name.rpartition("-")[2].split(".")) >= folder.floor
        return True

    def answers(self, folders: Mapping[str, Folder]) -> tuple[str, dict[str, list[int] | str]]:
        """The reader's version, and tokens, or why there are none, by the folders' names."""
        tasks = {name: {"file": str(folder.file), "ids": folder.prompt} for name, folder in folders.items()}
        request = {"reader": self.name, "tasks": tasks, "count": COUNT}
        variables = os.environ | ({} if self.path is None else {"PYTHONPATH": str(self.path)})
        done = subprocess.run(
            self.program, input=json.dumps(request), capture_output=True, text=True, timeout=900, env=variables
        )
        if done.returncode:
            raise RuntimeError(f"{self.name} failed:\n{done.stderr}")
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer["version"], answer["answers"]


def _older(version: str) -> Reader:
    packages = _ENVIRONMENTS / f"onnxruntime-{version}"
    return Reader(f"onnxruntime {version}", (sys.executable, str(HERE / "run_onnxruntime.py")), packages, packages)


_OPENVINO = _ENVIRONMENTS / "bin/python"
_NODE = ("node", str(HERE / "run_node.mjs"))
READERS = {
    reader.name: reader
    for reader in (
        Reader("OpenVINO", (str(_OPENVINO), str(HERE / "run_openvino.py")), _OPENVINO),
        Reader("transformers.js", _NODE, HERE / "node_modules/@huggingface/transformers"),
        Reader("onnxruntime-web", _NODE, HERE / "node_modules/onnxruntime-web"),
        Reader("onnxruntime-node", _NODE, HERE / "node_modules/onnxruntime-node"),
        *(_older(version) for version in ONNXRUNTIMES),
    )
}
