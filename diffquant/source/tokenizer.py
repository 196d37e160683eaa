"""Loads a checkpoint's tokenizer.

Where there is a tokenizer.json, it alone says how text is split, normalized and decoded. transformers rebuilds that
for many of the classes that tokenizer_config.json may name, from the file's vocabulary and with code of its own, and
splits otherwise then than every runtime that reads the file.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from diffquant import data
from diffquant.errors import CheckpointError
from diffquant.formats.folder import check_fetched
from diffquant.formats.hub import local_path
from diffquant.formats.json_object import read_json
from diffquant.formats.opening import is_gguf
from diffquant.formats.reader import Checkpoint
from diffquant.support.files import check_plain_inside
from diffquant.support.logs import log_once

_FILE = "tokenizer.json"
# Every tokenizer that transformers reads has one of these files.
_FILES = (
    _FILE,
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)
_HERE = {"local_files_only": True, "trust_remote_code": False}
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# What rebuilt tokenizers read differently, beside prose: white space, line ends, digits, contractions, code, compatible
# and composed characters, other scripts, and the marks with which vocabularies write a space.
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


def load_tokenizer(path: Path | str) -> Any:
    """Load the checkpoint's tokenizer from its own files, without running code of the checkpoint.

    Raises:
        CheckpointError: there is none, it cannot be read, or it is a Python program.
    """
    path = local_path(Path(path))
    _check_files(path)
    with _reading(path):
        if is_gguf(path):
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
    if not path.is_dir():
        return
    try:
        check_plain_inside(path)
    except OSError as error:
        raise CheckpointError(f"cannot read a tokenizer from {path}: {error}; remove it") from error
    check_fetched(path)
    if not any((path / name).exists() for name in _FILES):
        raise CheckpointError(
            f"cannot read a tokenizer from {path}: there is no {_FILES[0]}; copy it from the model it was made from"
        )


def class_difference(path: Path) -> str:
    """How the class that other engines load reads text otherwise than tokenizer.json says; "" where it does not.

    Raises:
        CheckpointError: the tokenizer cannot be read.
    """
    if not (path / _FILE).exists():
        return ""
    with _reading(path):
        return _of_file(path)[1]


def _of_folder(path: Path) -> Any:
    if (path / _FILE).exists():
        tokenizer, difference = _of_file(path)
        if difference:
            message = "%s: text is split as tokenizer.json says, as in other runtimes; %s"
            log_once(__name__, logging.WARNING, message, path, difference)
    else:
        tokenizer = _of_class(path)
    # What a program saves of it names no code.
    tokenizer.init_kwargs.pop("auto_map", None)
    # It would warn of "indexing errors" of every text that is longer than the context and then cut into windows.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def _of_class(path: Path) -> Any:
    from transformers import AutoTokenizer

    # Without trust_remote_code, transformers asks on stdin whether to run the checkpoint's code.
    return AutoTokenizer.from_pretrained(path, config=_config(path), **_HERE)


def _of_file(path: Path) -> tuple[Any, str]:
    """The tokenizer of tokenizer.json, and how transformers' class for it differs; "" where it does not."""
    try:
        of_class = _of_class(path)
    except Exception as error:  # a class that does not fit the file may raise anything
        return _in_class_of(path, None), f"transformers cannot load the class that is named ({_first_line(error)})"
    tokenizer = _in_class_of(path, of_class)
    if (text := _first_difference(of_class, tokenizer)) is None:
        return tokenizer, ""
    return tokenizer, f"transformers' {type(of_class).__name__} would read {text[:40]!r} otherwise"


def _config(path: Path) -> Any:
    """What transformers chooses a class by. The rest of config.json is the model's, and it may refuse some of that."""
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


def _in_class_of(path: Path, of_class: Any) -> Any:
    """The tokenizer of tokenizer.json, with what tokenizer_config.json states and, for the rest, what its class has."""
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


def _first_difference(of_class: Any, of_file: Any) -> str | None:
    """The first text that two tokenizers encode or decode differently, or None if there is none."""
    if of_class is of_file:
        return None
    prose = data.books_text()[: _PARTS * _PART]
    for text in (*_ODD_TEXTS, *(prose[i : i + _PART] for i in range(0, len(prose), _PART))):
        with suppress(Exception):  # a class that does not fit the file may raise anything
            ids = of_file.encode(text)
            if of_class.encode(text) == ids and _decoded(of_class, ids) == _decoded(of_file, ids):
                continue
        return text
    return None


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


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
        why = _first_line(error)
        if "trust_remote_code" in str(error):
            why = "it is Python code of the checkpoint's own, which is never run; it needs a tokenizer.json"
        raise CheckpointError(f"cannot read a tokenizer from {path}: {why}") from error
    finally:
        logging.set_verbosity(verbosity)
