"""What tests of examples/web need: Node, the npm packages that `make test-all ONLY=web` fetches, and Chromium."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WEB = ROOT / "examples/web"
CHROMIUM = shutil.which("chromium")

_HAS_PACKAGES = bool(shutil.which("node")) and (WEB / "node_modules/onnxruntime-web").is_dir()
needs_node = pytest.mark.skipif(not _HAS_PACKAGES, reason="needs Node and what make test-all ONLY=web fetches")
needs_chromium = pytest.mark.skipif(
    not _HAS_PACKAGES or CHROMIUM is None, reason="needs Chromium, Node and what make test-all ONLY=web fetches"
)
needs_minutes = pytest.mark.skipif("DIFFQUANT_WEBGPU" not in os.environ, reason="make test-all ONLY=webgpu")


def node(program: str, request: dict[str, Any]) -> Any:
    """What a program of this folder answers to a request, both of them JSON."""
    command = ["node", str(Path(__file__).parent / program)]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(f"{program} failed:\n{done.stderr}")
    return json.loads(done.stdout)
