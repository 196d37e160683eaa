"""What pip must be told to add to this very installation of diffquant, wherever it came from."""

import json
import shlex
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname


def install_command(extra: str = "") -> str:
    """The pip command that adds an extra, or all that is required, to this installation."""
    clone = Path(__file__).parents[2]
    is_run_in_place = (clone / "pyproject.toml").is_file()
    what = (str(clone) if is_run_in_place else _origin() or "diffquant") + (f"[{extra}]" if extra else "")
    return f"pip install {'-e ' if is_run_in_place else ''}{shlex.quote(what)}"


def _origin() -> str | None:
    """Path of the clone or wheel that pip installed; None where it came from an index, or is there no more.

    Source: PEP 610, direct_url.json.
    """
    try:
        recorded = metadata.distribution("diffquant").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    url = urlsplit(json.loads(recorded)["url"]) if recorded else None
    path = url2pathname(url.path) if url and url.scheme == "file" else ""
    return path if path and Path(path).exists() else None
