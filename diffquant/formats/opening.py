"""Opens a checkpoint in any supported format."""

import re
from difflib import get_close_matches
from pathlib import Path

from diffquant.errors import CheckpointError
from diffquant.formats.dequantized import dequantized
from diffquant.formats.folder import FolderCheckpoint
from diffquant.formats.hub import local_path
from diffquant.formats.reader import Checkpoint
from diffquant.support.listing import first_few
from diffquant.support.plain_data import is_text


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a folder of safetensors, a .gguf file, or a model of the hub by its name.

    Raises:
        CheckpointError: the path holds neither, or files are missing, truncated or outside the
            folder, or weights that another library packed are not as its layout has them; every offending file and
            tensor is named.
    """
    path = local_path(Path(path))
    if not is_text(str(path.absolute())):
        raise CheckpointError(f"the path {str(path)!r} is not UTF-8, and safetensors opens no such path; rename it")
    if is_gguf(path):
        # Here, since a folder is opened without the time that importing gguf takes.
        from diffquant.formats.gguf import GgufCheckpoint

        return GgufCheckpoint(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is neither a checkpoint folder nor a .gguf file; {_meant(path)}")
    if inside := _checkpoints_in(path):
        which = f"{inside[0]}, which is in it" if len(inside) == 1 else f"one of {first_few(map(str, inside), ', ')}"
        raise CheckpointError(f"{path} has no config.json; give {which}")
    return dequantized(FolderCheckpoint(path))


def is_gguf(path: Path) -> bool:
    """Whether a path is one of a .gguf file; a folder may have such a name, too."""
    return path.suffix.lower() == ".gguf" and not path.is_dir()


def _meant(path: Path) -> str:
    """What to give in place of a path that leads to no checkpoint."""
    if path.is_file():
        holds = (path.parent / "config.json").exists()
        return f"give the folder that it is in, {path.parent}" if holds else "give a folder with a config.json"
    # A path has lost one of the address's two slashes.
    if address := re.fullmatch(r"https?:/huggingface\.co/([^/]+/[^/]+).*", path.as_posix()):
        return f"a model of the hub is named ORG/NAME: {address[1]}"
    return f"{_nearest(path)}a model of the hub is named ORG/NAME"


def _checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder that is not one: .gguf files, or snapshots in a folder of the hub's cache."""
    if (folder / "config.json").exists():
        return []
    snapshots = [file.parent for file in folder.glob("snapshots/*/config.json")]
    return sorted([*filter(is_gguf, folder.iterdir()), *snapshots])


def _nearest(path: Path) -> str:
    """Ask whether a neighbour with a similar name was meant; "" if there is none."""
    try:
        names = [each.name for each in path.parent.iterdir() if each.is_dir() or is_gguf(each)]
    except OSError:
        return ""
    near = get_close_matches(path.name, names, n=1, cutoff=0.8)
    return f"did you mean {path.parent / near[0]}? " if near else ""
