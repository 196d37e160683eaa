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

import onnx
from onnx.reference import ReferenceEvaluator

from tests.readers.decoding import greedy
from tests.readers.folders import COUNT, Folder

HERE = Path(__file__).parent
_ENVIRONMENTS = HERE.parents[1] / "build/readers"
ONNXRUNTIMES = [line.split()[0] for line in (HERE / "onnxruntime.txt").read_text().splitlines()]
_NUMPY_OF = {onnx.TensorProto.FLOAT: "float32", onnx.TensorProto.INT8: "int8", onnx.TensorProto.UINT8: "uint8"}


@dataclass(frozen=True)
class Reader:
    """A reader of ONNX.

    Attributes:
        name: what it is called.
        program: words that start it; none for onnx's evaluator, which runs in this process.
        needs: a file that is there where it is installed.
        path: Python packages that it takes before others.
    """

    name: str
    program: tuple[str, ...] = ()
    needs: Path = HERE
    path: Path | None = None

    @property
    def is_there(self) -> bool:
        return self.needs.exists() and (not self.program or shutil.which(self.program[0]) is not None)

    def reads(self, folder: Folder) -> bool:
        """Whether the reader claims the folder: onnx's evaluator has standard operators alone, a runtime its floor."""
        if not self.program:
            return bool(folder.feature.options.get("pure"))
        if self.path is not None:
            return tuple(int(part) for part in self.path.name.rpartition("-")[2].split(".")) >= folder.floor
        return True

    def answers(self, folders: Mapping[str, Folder]) -> tuple[str, dict[str, list[int] | str]]:
        """The reader's version, and tokens, or why there are none, by the folders' names."""
        if not self.program:
            return onnx.__version__, {name: _evaluated(folder) for name, folder in folders.items()}
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


def _evaluated(folder: Folder) -> list[int]:
    session = ReferenceEvaluator(str(folder.file))
    types = {each.name: each.type.tensor_type for each in onnx.load(folder.file, load_external_data=False).graph.input}
    caches = {
        name: (_NUMPY_OF[kind.elem_type], [dim.dim_value for dim in kind.shape.dim[1:]])
        for name, kind in types.items()
        if name.startswith("past")
    }
    names = session.output_names
    return greedy(lambda feeds: dict(zip(names, session.run(None, feeds), strict=True)), caches, folder.prompt, COUNT)


def _older(version: str) -> Reader:
    packages = _ENVIRONMENTS / f"onnxruntime-{version}"
    return Reader(f"onnxruntime {version}", (sys.executable, str(HERE / "run_onnxruntime.py")), packages, packages)


_OPENVINO = _ENVIRONMENTS / "bin/python"
_NODE = ("node", str(HERE / "run_node.mjs"))
READERS = {
    reader.name: reader
    for reader in (
        Reader("onnx's reference evaluator"),
        Reader("OpenVINO", (str(_OPENVINO), str(HERE / "run_openvino.py")), _OPENVINO),
        Reader("transformers.js", _NODE, HERE / "node_modules/@huggingface/transformers"),
        Reader("onnxruntime-web", _NODE, HERE / "node_modules/onnxruntime-web"),
        Reader("onnxruntime-node", _NODE, HERE / "node_modules/onnxruntime-node"),
        *(_older(version) for version in ONNXRUNTIMES),
    )
}
