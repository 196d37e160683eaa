"""Loads a checkpoint's tokenizer."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diffquant.errors import CheckpointError
from diffquant.formats.hub import local_path
from diffquant.formats.reader import Checkpoint

# Every tokenizer that transformers reads has one of these files.
_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)


def load_tokenizer(path: Path | str) -> Any:
    """Load the checkpoint's tokenizer from its own files, without running code of the checkpoint.

    Raises:
        CheckpointError: there is none, it cannot be read, or it is a Python program.
    """
    path = local_path(Path(path))
    _check_files(path)
    with _reading(path):
        if path.suffix == ".gguf":
            # Imported here, since opening a folder does not need gguf, which is slow to import.
            from diffquant.formats.gguf_tokenizer import load_gguf_tokenizer

            return load_gguf_tokenizer(path)
        return _of_folder(path)


def tokenizer_of(checkpoint: Checkpoint) -> Any:
    """The tokenizer of a checkpoint that is open, as `load_tokenizer` gives it.

    Raises:
        CheckpointError: as `load_tokenizer` raises it.
    """
    _check_files(checkpoint.path)
    with _reading(checkpoint.path):
        return checkpoint.tokenizer or _of_folder(checkpoint.path)


def _check_files(path: Path) -> None:
    if path.is_dir() and not any((path / name).exists() for name in _FILES):
        raise CheckpointError(
            f"cannot read a tokenizer from {path}: there is no {_FILES[0]}; copy it from the model it was made from"
        )


def _of_folder(path: Path) -> Any:
    from transformers import AutoTokenizer

    # Without trust_remote_code, transformers asks on stdin whether to run the checkpoint's code.
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    # What a program saves of it names no code.
    tokenizer.init_kwargs.pop("auto_map", None)
    # It would warn of "indexing errors" of every text that is longer than the context and then cut into windows.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """A context that names the checkpoint where its tokenizer cannot be read, and in which transformers is quiet."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    # transformers would warn about unknown model types, on which a tokenizer does not depend.
    logging.set_verbosity_error()
    try:
        yield
    except Exception as error:  # tokenizers may raise anything, even a bare Exception
        why = str(error).strip().partition("\n")[0]
        if "trust_remote_code" in str(error):
            why = "it is Python code of the checkpoint's own, which is never run; it needs a tokenizer.json"
        raise CheckpointError(f"cannot read a tokenizer from {path}: {why}") from error
    finally:
        logging.set_verbosity(verbosity)
