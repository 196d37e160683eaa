"""Which checkpoint it is, wherever it lies."""

import hashlib
import json
from functools import lru_cache
from pathlib import Path

from diffquant.checkpoint.reader import open_checkpoint, side_files
from diffquant.checkpoint.staging import file_digest


def model_fingerprint(path: Path) -> str:
    """SHA-256 over the contents of a checkpoint's weights, config and tokenizer, wherever they lie.

    Raises:
        CheckpointError: the checkpoint cannot be opened.
    """
    if path.is_file():
        files = [path]
    else:
        files = [*open_checkpoint(path).weight_files(), path / "config.json", *side_files(path)]
    digests = {file.name: _digest_once(file.resolve(), _state(file)) for file in files}
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=1024)
def _digest_once(file: Path, state: tuple[int, ...]) -> str:
    return file_digest(file)


def _state(file: Path) -> tuple[int, ...]:
    """What changes whenever the file is written again."""
    status = file.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
