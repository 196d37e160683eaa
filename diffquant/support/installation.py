"""This installation of diffquant: its requirements, and the pip command that adds an extra to it."""

import json
import shlex
import tomllib
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import url2pathname

from diffquant.errors import MissingDependencyError

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def install_command(extra: str = "") -> str:
    """The pip command that adds an extra, or all requirements, to this installation."""
    project = _project_file()
    what = (str(project.parent) if project.is_file() else _origin() or "diffquant") + (f"[{extra}]" if extra else "")
    return f"pip install {'-e ' if project.is_file() else ''}{shlex.quote(what)}"


def requirements() -> "dict[str, list[Requirement]]":
    """What this installation needs on this machine, under "", and what each extra needs beside it, under its name.

    A clone that runs in place reads pyproject.toml, which may be newer than pip's record; a wheel reads its metadata.

    Raises:
        MissingDependencyError: it is neither a clone nor on pip's record, or `packaging`, which reads them, is missing.
    """
    try:
        from packaging.requirements import Requirement

        texts = _declared()
    except ModuleNotFoundError as error:
        name = str(error.name).partition(".")[0]
        raise MissingDependencyError(f"{name} is not installed, or pip does not know: {install_command()}") from None

    def needed(extra: str) -> list[Requirement]:
        wanted = map(Requirement, texts[extra])
        return [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": extra})]

    always = needed("")
    names = {each.name for each in always}
    return {"": always} | {
        extra: [each for each in needed(extra) if each.name not in names] for extra in texts if extra
    }


def _declared() -> dict[str, list[str]]:
    """Requirements under "" and by extra; a marker tells if one belongs to another extra."""
    project = _project_file()
    if project.is_file():
        declared = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        return {"": declared["dependencies"], **declared["optional-dependencies"]}
    recorded = metadata.metadata("diffquant")
    extras = ["", *(recorded.get_all("Provides-Extra") or [])]
    return dict.fromkeys(extras, recorded.get_all("Requires-Dist") or [])


def _project_file() -> Path:
    """pyproject.toml of the clone, if this is a clone that runs in place."""
    return Path(__file__).parents[2] / "pyproject.toml"


def _origin() -> str | None:
    """Path of the clone or wheel that pip installed, or None if it came from an index or is gone.

    Source: PEP 610, direct_url.json.
    """
    try:
        recorded = metadata.distribution("diffquant").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    url = urlsplit(json.loads(recorded)["url"]) if recorded else None
    path = url2pathname(url.path) if url and url.scheme == "file" else ""
    return path if path and Path(path).exists() else None
