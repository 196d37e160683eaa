"""What an installation and a source distribution hold, and whether an index would take them."""

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

from diffquant.onnx.native.build import LIBRARY
from tests.support.thorough import thorough

ROOT = Path(__file__).parents[1]
# Packages by the folders at the top that hold them.
ROOMS = {"export": "onnx", "calib": "calib", "bench": "benchmarks"}
SUFFIXES = (".py", ".cc", ".h", ".j2", ".css", ".js", ".typed")
NOT_BUILT = shutil.ignore_patterns(
    ".*", "results", "node_modules", "build", "dist", "*.egg-info", "__pycache__", "*.so", "*.dylib"
)

pytest.importorskip("setuptools", minversion="77")


def expected_files():
    """Paths in an installation, as the source tree has them: modules, data, templates, the native kernel's sources."""
    rooms = [(ROOT / room, Path("diffquant", name)) for room, name in ROOMS.items()]
    for folder, installed in [(ROOT / "diffquant", Path("diffquant")), *rooms]:
        for file in folder.rglob("*"):
            path = file.relative_to(folder)
            is_data = path.parts[0] == "data" and not any(part.startswith("prose-") for part in path.parts)
            is_installed = is_data or file.suffix in SUFFIXES
            if file.is_file() and is_installed and "__pycache__" not in path.parts:
                yield str(installed / path)


def run(code, *options, cwd, **environment):
    """What a fresh interpreter writes to stdout and stderr."""
    command = [sys.executable, *options, "-c", code]
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def built(kind, folder, tree, compiler):
    """The archive that setuptools makes of a source tree, and its stderr; `kind` is sdist, wheel or editable."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(folder)!r}))"
    out, err = run(code, cwd=tree, CXX=str(compiler))
    return folder / out.splitlines()[-1], err


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the source tree, so that building leaves nothing behind in it."""
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("source") / "tree", symlinks=True, ignore=NOT_BUILT)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    """A stand-in for a C++ compiler: each file it is asked for is empty."""
    script = tmp_path_factory.mktemp("bin") / "c++"
    script.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n')
    script.chmod(0o755)
    return script


@pytest.fixture(scope="module")
def archives(tree, compiler, tmp_path_factory):
    """A source distribution, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    archive, _ = built("sdist", folder, tree, compiler)
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    file, _ = built("wheel", folder, folder / archive.name.removesuffix(".tar.gz"), compiler)
    return archive, file


@pytest.fixture(scope="module")
def wheel(archives):
    """Names of the files in a wheel that was built from a source distribution."""
    return zipfile.ZipFile(archives[1]).namelist()


def test_a_wheel_of_a_source_distribution_holds_every_module_the_data_and_the_kernel(wheel):
    assert {*expected_files(), f"diffquant/onnx/native/{LIBRARY}"} - set(wheel) == set()


def test_a_wheel_holds_the_package_alone(wheel):
    assert {name.split("/")[0].split("-")[0] for name in wheel} == {"diffquant"}
    assert not [name for name in wheel if "/results/" in name or "/tests/" in name]


def test_a_source_distribution_holds_tests_pages_and_all_models(archives):
    with tarfile.open(archives[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = ["CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "SECURITY.md"]
    wanted += [*(f"constraints{kind}.txt" for kind in ("", "-hashed", "-serving")), "mkdocs.yml"]
    folders = ("docs", "tests", "examples", "research", "diffquant/data")
    wanted += [str(f.relative_to(ROOT)) for folder in folders for f in (ROOT / folder).rglob("*") if f.is_file()]
    made = ("__pycache__", "results", "node_modules")
    missing = {name for name in wanted if not any(part in name for part in made)} - names
    assert not missing
    assert not [name for name in names if name.endswith((".so", ".pyc", ".dylib"))]


def test_a_wheel_leaves_out_the_models_that_no_verb_uses(wheel):
    assert not [name for name in wheel if "pocket/prose-" in name]
    assert [name for name in wheel if "pocket/needle-diff-v1/model.safetensors" in name]


def test_an_index_takes_both_archives(archives):
    pytest.importorskip("twine")
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, archives)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_long_description_has_no_link_that_breaks(archives):
    file = zipfile.ZipFile(archives[1])
    (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(file.read(name))
    description = metadata.get_payload()
    targets = re.findall(r"\]\(([^)]*)\)", description)
    assert targets
    assert not [target for target in targets if not target.startswith("https://")]
    assert "# diffquant" in description
    assert {"Author", "Keywords", "Classifier", "License-Expression"} <= set(metadata.keys())


def test_conda_requires_what_pip_requires():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    recipe = yaml.safe_load((ROOT / "examples/conda/recipe.yaml").read_text(encoding="utf-8"))
    of_conda = {"torch": "pytorch", "matplotlib": "matplotlib-base", "xxhash": "python-xxhash"}
    pairs = [dependency.partition(">=") for dependency in project["dependencies"]]
    wanted = [f"{of_conda.get(name, name)} >={version}" for name, _, version in pairs]
    assert recipe["requirements"]["run"] == [f"python {project['requires-python']}", *wanted]
    assert recipe["package"] == {"name": project["name"], "version": project["version"]}
    assert recipe["about"]["summary"] == project["description"]
    (entry,) = (f"{name} = {target}" for name, target in project["scripts"].items())
    assert recipe["build"]["python"]["entry_points"] == [entry]


@thorough
@pytest.mark.skipif(sys.platform != "linux", reason="wheels of other systems name no C library")
def test_a_wheel_with_the_kernel_says_which_linux_it_needs(tree, tmp_path):
    pytest.importorskip("auditwheel")
    library = ROOT / "export/native" / LIBRARY
    if not library.is_file():
        pytest.skip("the native kernel is not built")
    copier = tmp_path / "c++"
    copier.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncp {library} "$2"\n')
    copier.chmod(0o755)
    file, _ = built("wheel", tmp_path, tree, copier)
    out, _ = run(
        f"from auditwheel.main import main; import sys; sys.argv = ['', 'show', {str(file)!r}]; main()", cwd=tmp_path
    )
    assert re.search(r"manylinux_2_(1\d|2\d)_x86_64|manylinux_2_\d\d_aarch64", out), out


def test_a_wheel_installs_into_an_empty_environment_and_quantizes(archives, tmp_path):
    place = tmp_path / "environment"
    venv.create(place)
    python = place / ("Scripts" if os.name == "nt" else "bin") / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*command, str(archives[1])], check=True)
    # The libraries that it needs; what is editable in their environment is not seen from here.
    (site,) = place.rglob("site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    code = f"""
import diffquant
from diffquant.data import pocket_models
assert {str(place)!r} in diffquant.__file__, diffquant.__file__
print(diffquant.quantize(pocket_models("needle")[0], "out", "4:g32").packed_bits)
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for arguments in (["-c", code], ["-m", "diffquant", "inspect", "out"], ["-m", "diffquant", "--version"]):
        done = subprocess.run([python, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("diffquant 0.")


@thorough
def test_a_wheel_is_built_without_the_kernel_where_the_compiler_fails(tree, tmp_path):
    file, err = built("wheel", tmp_path, tree, sys.executable)
    assert "the native kernel is left out" in err
    assert set(expected_files()) - set(zipfile.ZipFile(file).namelist()) == set()


@thorough
def test_an_editable_installation_finds_the_rooms_in_the_source_tree(tree, compiler, tmp_path):
    file, _ = built("editable", tmp_path, tree, compiler)
    zipfile.ZipFile(file).extractall(tmp_path / "site")
    code = f"""
import site
site.addsitedir({str(tmp_path / "site")!r})
from importlib.util import find_spec
print(*(find_spec(f"diffquant.{{room}}").origin for room in {tuple(ROOMS.values())}), sep="\\n")
"""
    # Isolated and without its own site-packages the interpreter knows this installation alone.
    out, _ = run(code, "-I", "-S", cwd=tmp_path)
    assert out.split() == [str(tree / f"diffquant/{room}/__init__.py") for room in ROOMS.values()]
