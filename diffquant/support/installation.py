"""Describes this installation: its version, commit and requirements, and the packages that a result was made with."""

import hashlib
import json
import shlex
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING

from diffquant.errors import MissingDependencyError

if TYPE_CHECKING:
    from packaging.requirements import Requirement


__version__ = "0.1.0"

# The version of config.json's `diffquant_config`; readers refuse a newer one.
CONFIG_VERSION = 1


def versions() -> dict[str, str]:
    """Return versions of diffquant and torch by name."""
    import torch

    return {"diffquant": __version__, "torch": torch.__version__}


def list_compute_versions(device: str) -> dict[str, str]:
    """Return versions of everything that computes a model's output on a device."""
    import torch

    kernels = ("triton", "flash-attn") if torch.device(device).type == "cuda" else ()
    return versions() | {name: installed_version(name) or "not installed" for name in ("transformers", *kernels)}


def installed_version(package: str) -> str:
    """Return the version of an installed package, or "" if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


_PACKAGE = Path(__file__).parents[1]

# Suffix of a commit if sources differ from it.
CHANGED = "+changes"


def result_version_digest(modules: Iterable[str]) -> str:
    """Return a digest of 16 hex digits of the versions of some modules, from which the keys of stored results are made.

    The version of a module of diffquant is the `RESULT_VERSION` that it or the nearest package around it defines.
    Developers raise it when a change alters stored results. The version of any other module, such as a task of the
    user's own, is a digest of its source file.

    Raises:
        ValueError: a module outside of diffquant has no source file.
    """
    versions = sorted({_version(module) for module in modules})
    return hashlib.sha256("".join(f"{name} {version}\n" for name, version in versions).encode()).hexdigest()[:16]


def _version(module: str) -> tuple[str, str]:
    place = module
    while place.partition(".")[0] == _PACKAGE.name:
        version = getattr(import_module(place), "RESULT_VERSION", None)
        if version is not None:
            return place, str(version)
        place = place.rpartition(".")[0]
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        raise ValueError(f"module {module} has no source file, so results of different code cannot be distinguished")
    return module, hashlib.sha256(Path(file).read_bytes()).hexdigest()


# Folders of a checkout whose code can change a result.
_MEASURED = ("diffquant", "export", "calib", "bench", "research")


@cache
def find_commit() -> str | None:
    """Return the commit of the checkout that this package runs from, with "+changes" if sources differ.

    An installed wheel has no checkout; the result is then None.
    """
    sources = [f":(top){folder}/*.{suffix}" for folder in _MEASURED for suffix in ("py", "cc", "h")]
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    head = _git("rev-parse", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=all", "--", *sources)
    return None if head is None else head + (CHANGED if changed else "")


def provenance() -> dict[str, str | None]:
    """Return the date and commit of a measurement, for the settings of its results."""
    return {"date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), "commit": find_commit()}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=_PACKAGE, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def install_command(extra: str = "") -> str:
    """Return the pip command that adds an extra to this installation, or all requirements if `extra` is empty."""
    project = _project_file()
    what = (str(project.parent) if project.is_file() else _origin() or "diffquant") + (f"[{extra}]" if extra else "")
    return f"pip install {'-e ' if project.is_file() else ''}{shlex.quote(what)}"


def requirements() -> "dict[str, list[Requirement]]":
    """Return this installation's requirements on this machine: those of each extra by its name, all others under "".

    A clone that runs in place reads pyproject.toml, which may be newer than pip's record; a wheel reads its metadata.

    Raises:
        MissingDependencyError: diffquant neither runs from a clone nor is in pip's records, or `packaging` is missing.
    """
    try:
        from packaging.requirements import Requirement

        texts = _declared_requirements()
    except ModuleNotFoundError as error:
        name = str(error.name).partition(".")[0]
        raise MissingDependencyError(
            f"{name} is not installed, or pip has no record of it: run {install_command()}"
        ) from None

    def select(extra: str) -> list[Requirement]:
        wanted = map(Requirement, texts[extra])
        return [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": extra})]

    always = select("")
    names = {each.name for each in always}
    return {"": always} | {
        extra: [each for each in select(extra) if each.name not in names] for extra in texts if extra
    }


def _declared_requirements() -> dict[str, list[str]]:
    """Return requirements under "" and by extra; a marker shows whether one belongs to another extra."""
    project = _project_file()
    if project.is_file():
        import tomllib

        declared = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        return {"": declared["dependencies"], **declared["optional-dependencies"]}
    recorded = metadata.metadata("diffquant")
    extras = ["", *(recorded.get_all("Provides-Extra") or [])]
    return dict.fromkeys(extras, recorded.get_all("Requires-Dist") or [])


def _project_file() -> Path:
    """Return the path of pyproject.toml in a clone that runs in place."""
    return Path(__file__).parents[2] / "pyproject.toml"


def _origin() -> str | None:
    """Return the path of the clone or wheel that pip installed, or None if it came from an index or is gone.

    Source: PEP 610, direct_url.json.
    """
    # Imported here, since http.client and ssl, which come with it, would slow down `import diffquant`.
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        recorded = metadata.distribution("diffquant").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    url = urlsplit(json.loads(recorded)["url"]) if recorded else None
    path = url2pathname(url.path) if url and url.scheme == "file" else ""
    return path if path and Path(path).exists() else None
