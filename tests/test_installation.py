"""What messages say to install, and versions that outputs are signed with."""

import json
import shlex
import subprocess
import sys
import tomllib
from email import message_from_string
from importlib import metadata
from pathlib import Path

import pytest

import diffquant
from diffquant.__main__ import main
from diffquant.errors import MissingDependencyError
from diffquant.support import installation
from diffquant.support.installation import install_command, versions
from tests.support.thorough import thorough

ROOT = Path(__file__).parents[1]
WITHOUT_TYPER = "import sys; sys.modules['typer'] = None; from diffquant.__main__ import main; main()"
# The paths of site-packages, which hold the metadata of what is installed there, are hidden from importlib.metadata.
NOT_INSTALLED = """
import importlib.metadata
found = importlib.metadata.Distribution.from_name
def not_ours(name):
    if name == "diffquant":
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)
importlib.metadata.Distribution.from_name = not_ours
from diffquant.benchmarks.measuring import describe_environment
from diffquant.support.installation import versions
print(versions()["diffquant"], describe_environment()["versions"]["diffquant"])
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package installed from a url, as pip records it."""
    monkeypatch.setattr(installation, "__file__", str(tmp_path / "site-packages/diffquant/support/installation.py"))

    def record(url):
        text = None if url is None else json.dumps({"url": url, "dir_info": {}})
        recorded = type("Recorded", (), {"read_text": lambda _, name: text if name == "direct_url.json" else None})()
        monkeypatch.setattr(metadata, "distribution", lambda _: recorded)

    return record


def test_a_clone_that_runs_in_place_is_named():
    assert install_command("onnx") == f"pip install -e {shlex.quote(f'{ROOT}[onnx]')}"
    assert install_command() == f"pip install -e {ROOT}"


def test_a_clone_or_wheel_that_was_installed_is_named_while_it_is_there(installed, tmp_path):
    clone = tmp_path / "a clone"
    clone.mkdir()
    installed(clone.as_uri())
    assert install_command("search") == f"pip install '{clone}[search]'"
    clone.rmdir()
    assert install_command("search") == "pip install 'diffquant[search]'"


@pytest.mark.parametrize("url", [None, "https://example.org/diffquant-0.1.0-py3-none-any.whl"])
def test_what_came_over_a_network_is_installed_by_its_name(installed, url):
    installed(url)
    assert install_command("onnx") == "pip install 'diffquant[onnx]'"
    assert install_command() == "pip install diffquant"


def test_a_package_that_is_not_on_record_is_installed_by_its_name(installed, monkeypatch):
    def absent(_):
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "distribution", absent)
    assert install_command() == "pip install diffquant"


RECORD = f"""\
Metadata-Version: 2.4
Name: diffquant
Requires-Dist: torch>=2.7
Requires-Dist: here>=3; sys_platform == "{sys.platform}"
Requires-Dist: elsewhere>=3; sys_platform != "{sys.platform}"
Requires-Dist: onnx[reference]>=1.20; extra == "onnx"
Requires-Dist: torch; extra == "onnx"
Requires-Dist: triton>=3.6; sys_platform == "{sys.platform}" and extra == "gpu"
Requires-Dist: metal>=1; sys_platform != "{sys.platform}" and extra == "gpu"
Provides-Extra: onnx
Provides-Extra: gpu
"""


def needed():
    return {
        extra: [f"{each.name}{each.specifier}" for each in wanted]
        for extra, wanted in installation.requirements().items()
    }


def test_an_installed_package_needs_what_its_record_asks_for_on_this_platform(installed, monkeypatch):
    installed(None)
    monkeypatch.setattr(metadata, "metadata", lambda _: message_from_string(RECORD))
    assert needed() == {"": ["torch>=2.7", "here>=3"], "onnx": ["onnx>=1.20"], "gpu": ["triton>=3.6"]}


def test_a_clone_that_was_never_installed_needs_what_its_project_file_says(monkeypatch):
    def absent(_):
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "metadata", absent)
    assert {"xxhash>=3.5", "huggingface_hub>=1.0"} <= set(needed()[""])
    assert [name.partition(">")[0] for name in needed()["search"]] == ["scipy"]


@pytest.mark.parametrize("missing", ["diffquant", "packaging"])
def test_where_nobody_can_say_what_is_needed_that_is_said(installed, monkeypatch, missing):
    installed(None)
    if missing == "packaging":
        monkeypatch.setitem(sys.modules, "packaging.requirements", None)
    else:
        monkeypatch.setattr(metadata, "distribution", metadata.Distribution.from_name)
        monkeypatch.setattr(metadata.Distribution, "discover", lambda **_: iter(()))
    with pytest.raises(
        MissingDependencyError, match=f"^{missing} is not installed, or pip has no record of it: run pip"
    ):
        installation.requirements()


def test_without_what_is_required_the_command_line_says_what_to_install():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TYPER, "doctor"], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == f"diffquant needs typer, which is not installed: {install_command()}\n"
    assert done.returncode == 5


def test_a_module_of_diffquants_own_that_is_missing_is_no_package_to_install(monkeypatch):
    monkeypatch.setattr("diffquant.__main__.watch_signals", lambda: None)
    monkeypatch.setitem(sys.modules, "diffquant.verbs.cli.command", None)
    with pytest.raises(ModuleNotFoundError, match=r"diffquant\.verbs\.cli\.command"):
        main()


def test_the_version_is_the_projects():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert versions()["diffquant"] == project["version"] == diffquant.__version__


@thorough
def test_a_package_on_the_path_alone_has_a_version():
    done = subprocess.run([sys.executable, "-c", NOT_INSTALLED], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == [diffquant.__version__] * 2, done.stderr
