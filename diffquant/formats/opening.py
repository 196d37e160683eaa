"""Opening of a checkpoint, whichever format it is stored in."""

from pathlib import Path

from diffquant.errors import CheckpointError
from diffquant.formats.reader import Checkpoint, FolderCheckpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a folder of safetensors, or a .gguf file.

    Raises:
        CheckpointError: the path holds neither, or files are missing, truncated or outside the
            folder; every offending file and tensor is named.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        # Here, since a folder is opened without the time that importing gguf takes.
        from diffquant.formats.gguf import GgufCheckpoint

        return GgufCheckpoint(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is neither a checkpoint folder nor a .gguf file")
    return FolderCheckpoint(path)
