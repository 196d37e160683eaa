"""The identity of a checkpoint: a fingerprint of its contents, independent of where they lie."""

import hashlib
import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from diffquant.formats.folder import side_files
from diffquant.formats.reader import Checkpoint
from diffquant.support.files import file_digest

# Device, inode, size and times of each file, by path.
FilesState = dict[str, tuple[int, ...]]


def checkpoint_fingerprint(checkpoint: Checkpoint) -> str:
    """SHA-256 over the contents of a checkpoint's weights, config and tokenizer, independent of paths."""
    root = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    digests = {
        file.relative_to(root).as_posix(): _digest_once(file.resolve(), _file_state(file))
        for file in _files(checkpoint)
    }
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def checkpoint_state(checkpoint: Checkpoint) -> FilesState:
    """State of the files behind a checkpoint's fingerprint, which changes if one is written or replaced."""
    return files_state(_files(checkpoint))


def files_state(files: Iterable[Path]) -> FilesState:
    """State of files: numbers for each, some of which change if it is written or replaced."""
    return {str(file): _file_state(file) for file in files}


def _files(checkpoint: Checkpoint) -> list[Path]:
    files = checkpoint.weight_files()
    if checkpoint.path.is_dir():
        files += [checkpoint.path / "config.json", *side_files(checkpoint.path)]
    return files


@lru_cache(maxsize=1024)
def _digest_once(file: Path, _state: tuple[int, ...]) -> str:
    return file_digest(file)


def _file_state(file: Path) -> tuple[int, ...]:
    """Numbers, some of which change if the file is written again."""
    status = file.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
