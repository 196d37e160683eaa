"""Checks that a path leads to a checkpoint, and suggests the path the user probably meant. Imports no torch."""

import re
from difflib import get_close_matches
from pathlib import Path

from diffquant.checkpoints.hub import find_hub_name
from diffquant.errors import CheckpointError
from diffquant.support.names import first_few
from diffquant.support.plain_data import is_encodable_text


def check_location(path: Path) -> None:
    """Check that a path leads to a folder or .gguf file, or names a model on the hub, which is not asked.

    Raises:
        CheckpointError: it does not; the message says what to give.
    """
    if not is_encodable_text(str(path.absolute())):
        raise CheckpointError(f"the path {str(path)!r} is not UTF-8, which safetensors cannot open; rename it")
    if is_gguf(path) or find_hub_name(path):
        return
    if not path.is_dir():
        raise CheckpointError(f"{path} is neither a checkpoint folder nor a .gguf file; {_suggest_path(path)}")
    if inside := _checkpoints_in(path):
        which = f"{inside[0]}, inside it" if len(inside) == 1 else f"one of {first_few(map(str, inside), ', ')}"
        raise CheckpointError(f"{path} has no config.json; give {which}")


def is_gguf(path: Path) -> bool:
    """Return whether a path ends in .gguf and is not a folder."""
    return path.suffix.lower() == ".gguf" and not path.is_dir()


def _suggest_path(path: Path) -> str:
    """Suggest the path the user probably meant."""
    if path.is_file():
        holds = (path.parent / "config.json").exists()
        return f"give its folder, {path.parent}" if holds else "give a folder with a config.json"
    # As a Path, the address has lost one of its two slashes.
    if address := re.fullmatch(r"https?:/huggingface\.co/([^/]+/[^/]+).*", path.as_posix()):
        return f"give the name of a model on the hub as ORG/NAME: {address[1]}"
    return f"{_suggest_neighbour(path)}give the name of a model on the hub as ORG/NAME"


def _checkpoints_in(folder: Path) -> list[Path]:
    """List the checkpoints inside a folder: .gguf files, or snapshots in a folder of the hub's cache."""
    if (folder / "config.json").exists():
        return []
    snapshots = [file.parent for file in folder.glob("snapshots/*/config.json")]
    return sorted([*filter(is_gguf, folder.iterdir()), *snapshots])


def _suggest_neighbour(path: Path) -> str:
    """Suggest a neighbour with a similar name; "" if there is none."""
    try:
        names = [each.name for each in path.parent.iterdir() if each.is_dir() or is_gguf(each)]
    except OSError:
        return ""
    near = get_close_matches(path.name, names, n=1, cutoff=0.8)
    return f"did you mean {path.parent / near[0]}? " if near else ""
