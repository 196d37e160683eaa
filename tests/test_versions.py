"""Versions that outputs are signed with, also where the package is found and not installed."""

import subprocess
import sys
import tomllib
from pathlib import Path

import diffquant
from diffquant.support.installation import versions
from tests.support.thorough import thorough

ROOT = Path(__file__).parents[1]

# The paths of site-packages, which hold the metadata of what is installed there, are hidden from importlib.metadata.
NOT_INSTALLED = """
import importlib.metadata
found = importlib.metadata.Distribution.from_name
def not_ours(name):
    if name == "diffquant":
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)
importlib.metadata.Distribution.from_name = not_ours
from diffquant.benchmarks.measuring import environment
from diffquant.support.installation import versions
print(versions()["diffquant"], environment()["versions"]["diffquant"])
"""


def test_the_version_is_the_projects():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert versions()["diffquant"] == project["version"] == diffquant.__version__


@thorough
def test_a_package_on_the_path_alone_has_a_version():
    done = subprocess.run([sys.executable, "-c", NOT_INSTALLED], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == [diffquant.__version__] * 2, done.stderr
