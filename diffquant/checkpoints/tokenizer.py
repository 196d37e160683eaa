"""Loads a checkpoint's tokenizer.

If there is a tokenizer.json, only that file determines how text is split, normalized and decoded. For many of the
classes that tokenizer_config.json may name, transformers takes only the vocabulary from that file and rebuilds the rest
in its own code. It then splits text differently from every runtime that reads the file.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from diffquant import data
from diffquant.checkpoints.hub import fetch_to_local_path
from diffquant.checkpoints.location import check_location, is_gguf
from diffquant.checkpoints.reader import Checkpoint
from diffquant.checkpoints.side_files import TOKENIZER_CONFIG, check_side_files, read_json
from diffquant.errors import CheckpointError
from diffquant.support.devices import log_once
from diffquant.support.files import check_no_special_files

_FILE = "tokenizer.json"
# Every tokenizer that transformers reads has one of these files.
_FILES = (
    _FILE, "tokenizer.model", TOKENIZER_CONFIG, "vocab.json", "vocab.txt", "spiece.model", "tekken.json",
)  # fmt: skip
_HERE = {"local_files_only": True, "trust_remote_code": False}
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Texts that rebuilt tokenizers may encode differently: white space, line ends, digits, contractions, code,
# compatibility and composed characters, other scripts, and the marks that stand for a space in vocabularies.
_ODD_TEXTS = (
    "Hello world",
    " a",
    "a  b   c    d\te \t f",
    "  \n\n\ta\r\nb\rc \n d\n",
    "a ",
    "1234567890 3.14159, 1,000,000 2x3 a1b22c333d4444",
    "I'll DON'T we've it's THEY'RE",
    "def f(x):\n    return {'a': [x**2, -1]}  # \\n",
    "caf\u00e9 cafe\u0301 \ufb01 \u2167 \u00bd \uff21 \u00df",
    "\u65e5\u672c\u8a9e \u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u0e44\u0e17\u0e22 \u0627\u0644 \U0001f642\u200d",
    "\u00a0a\u200bb\u3000c\u0000d",
    "a\u2581b \u0120c ##d</w>",
    "snake_case CamelCase ABC... --- https://a.b/c?d=e",
)
_PART, _PARTS = 400, 10


def has_tokenizer(path: Path) -> bool:
    """Return whether a checkpoint has files of a tokenizer; true for a .gguf file, which contains its tokenizer."""
    return path.is_file() or any((path / name).exists() for name in _FILES)


def load_tokenizer(path: Path | str) -> Any:
    """Load the checkpoint's tokenizer from its own files, without running code of the checkpoint.

    Raises:
        CheckpointError: there is none, it cannot be read, or it needs Python code of the checkpoint.
    """
    check_location(Path(path))
    path = fetch_to_local_path(Path(path))
    _check_files(path)
    with _name_checkpoint(path):
        if is_gguf(path):
            # Imported here, since opening a folder does not need gguf, which is slow to import.
            from diffquant.checkpoints.gguf_tokenizer import load_gguf_tokenizer

            return load_gguf_tokenizer(path)
        return _load_folder(path)


def open_tokenizer(checkpoint: Checkpoint) -> Any:
    """Return the tokenizer of an open checkpoint, as `load_tokenizer` does.

    Raises:
        CheckpointError: see `load_tokenizer`.
    """
    _check_files(checkpoint.path)
    with _name_checkpoint(checkpoint.path):
        return checkpoint.tokenizer or _load_folder(checkpoint.path)


def _check_files(path: Path) -> None:
    if not path.is_dir():
        return
    try:
        check_no_special_files(path)
    except OSError as error:
        raise CheckpointError(f"cannot read a tokenizer from {path}: {error}; remove it") from error
    check_side_files(path)
    if not has_tokenizer(path):
        raise CheckpointError(
            f"cannot read a tokenizer from {path}: {_FILES[0]} is missing; copy it from the model it was made from"
        )


def explain_tokenizer_difference(path: Path) -> str:
    """Explain how the tokenizer class that other engines load differs from tokenizer.json, or return "" if it does not.

    Raises:
        CheckpointError: the tokenizer cannot be read.
    """
    if not (path / _FILE).exists():
        return ""
    with _name_checkpoint(path):
        return _load_file(path)[1]


def _load_folder(path: Path) -> Any:
    if (path / _FILE).exists():
        tokenizer, difference = _load_file(path)
        if difference:
            message = "%s: text is split by tokenizer.json, as in other runtimes; %s"
            log_once(__name__, logging.WARNING, message, path, difference)
    else:
        tokenizer = _load_class(path)
    # Saved copies of the tokenizer then name no code of the checkpoint.
    tokenizer.init_kwargs.pop("auto_map", None)
    # Otherwise it would warn of "indexing errors" for each text longer than the context, although texts are cut later.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def _load_class(path: Path) -> Any:
    from transformers import AutoTokenizer

    # Without trust_remote_code, transformers asks on stdin whether to run the checkpoint's code.
    return AutoTokenizer.from_pretrained(path, config=_config(path), **_HERE)


def _load_file(path: Path) -> tuple[Any, str]:
    """Load tokenizer.json, and explain how transformers' class for it differs; "" if it does not."""
    try:
        of_class = _load_class(path)
    except Exception as error:  # a class that does not fit the file may raise anything
        return _wrap_as_class(path, None), f"transformers cannot load the named class ({_first_line(error)})"
    tokenizer = _wrap_as_class(path, of_class)
    if (text := find_differing_text(of_class, tokenizer)) is None:
        return tokenizer, ""
    return tokenizer, f"transformers' {type(of_class).__name__} would encode {text[:40]!r} differently"


def _config(path: Path) -> Any:
    """Return only the settings by which transformers chooses a class, since it may refuse others in config.json."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    entries = read_json(path / "config.json") if (path / "config.json").exists() else {}
    kind = entries.get("model_type")
    config = PreTrainedConfig()
    with suppress(Exception):  # some have no defaults
        config = CONFIG_MAPPING[kind]()
    for name in ("model_type", "model_name", "tokenizer_class"):
        if isinstance(entries.get(name), str):
            setattr(config, name, entries[name])
    return config


def _wrap_as_class(path: Path, of_class: Any) -> Any:
    """Load tokenizer.json with the settings of tokenizer_config.json and, for the rest, of its class."""
    from transformers import PreTrainedTokenizerFast

    if type(of_class) is PreTrainedTokenizerFast:
        return of_class
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path, **_HERE)
    if of_class is None:
        return tokenizer
    known = tokenizer.get_vocab()
    roles = {
        role: getattr(of_class, role)
        for role in _ROLES
        if getattr(tokenizer, role) is None and getattr(of_class, role, None) in known
    }
    if roles:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path, **_HERE, **roles)
    for name in ("padding_side", "truncation_side", "model_input_names"):
        setattr(tokenizer, name, getattr(of_class, name, getattr(tokenizer, name)))
    return tokenizer


def find_differing_text(of_class: Any, of_file: Any) -> str | None:
    """Return a sample text that two tokenizers encode or decode differently, or None if there is no such sample."""
    if of_class is of_file:
        return None
    prose = data.books_text()[: _PARTS * _PART]
    for text in (*_ODD_TEXTS, *(prose[i : i + _PART] for i in range(0, len(prose), _PART))):
        with suppress(Exception):  # a class that does not fit the file may raise anything
            ids = of_file.encode(text)
            if of_class.encode(text) == ids and _decode(of_class, ids) == _decode(of_file, ids):
                continue
        return text
    return None


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


@contextmanager
def _name_checkpoint(path: Path) -> Iterator[None]:
    """Name the checkpoint in errors about its tokenizer, and silence transformers, inside this context."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    # transformers would warn about unknown model types, on which a tokenizer does not depend.
    logging.set_verbosity_error()
    try:
        yield
    except Exception as error:  # tokenizers may raise anything, even a bare Exception
        why = _first_line(error)
        if "trust_remote_code" in str(error):
            why = "it is the checkpoint's Python code, which diffquant never runs; add a tokenizer.json"
        raise CheckpointError(f"cannot read a tokenizer from {path}: {why}") from error
    finally:
        logging.set_verbosity(verbosity)
