"""Opens a checkpoint in any supported format."""

from pathlib import Path

from diffquant.errors import CheckpointError
from diffquant.formats.hub import local_path
from diffquant.formats.reader import Checkpoint, FolderCheckpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a folder of safetensors, a .gguf file, or a model of the hub by its name.

    Raises:
        CheckpointError: the path holds neither, or files are missing, truncated or outside the
            folder; every offending file and tensor is named.
    """
    path = local_path(Path(path))
    if path.suffix == ".gguf":
        # Here, since a folder is opened without the time that importing gguf takes.
        from diffquant.formats.gguf import GgufCheckpoint

        return GgufCheckpoint(path)
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is neither a checkpoint folder nor a .gguf file; a model of the hub is named ORG/NAME"
        )
    return FolderCheckpoint(path)
