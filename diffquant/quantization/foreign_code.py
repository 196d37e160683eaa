"""Finds foreign code in a model's folder, and references to it, which diffquant neither runs nor writes.

With `trust_remote_code`, transformers and vLLM run whatever the folder's JSON files name: a module in the folder, a
file next to it, any path, or another repository. Some keys refer to another model or configuration, which is then
trusted too.

Sources: transformers 5.24, dynamic_module_utils.py, configuration_utils.py and models/auto; vLLM 0.32,
transformers_utils/config.py and model_executor/models/registry.py.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from diffquant.checkpoints.side_files import is_inside_folder_or_cache
from diffquant.checkpoints.tokenizer import load_tokenizer
from diffquant.errors import CheckpointError
from diffquant.model.adapters import Adapter
from diffquant.quantization.engine_folder import (
    MODELLING_FILES,
    config_for_engines,
    find_modelling_file,
    make_auto_map,
    make_modelling_text,
)
from diffquant.support.files import write_atomically
from diffquant.support.names import first_few, option_name
from diffquant.support.terminal import one_line

# Keys whose value names a class in a Python file, or another configuration or model to open instead.
REDIRECTS = ("configuration_files", "speculators_config")
_NAMES = ("auto_map", "custom_pipelines", "custom_generate", *REDIRECTS)
# Keys whose value may be a repository of compiled kernels, ORG/NAME.
_KERNELS = ("attn_implementation", "experts_implementation")
# Files that Python imports or another loader runs, and pickles, which can run code when they are opened.
_MODULES = (".py", ".pyc", ".pyo", ".pyw", ".pyd", ".so", ".dll", ".dylib", ".pth", ".egg", ".whl")
_PICKLES = (".bin", ".pt", ".pt2", ".ckpt", ".pkl", ".pickle")
_CONFIG = "config.json"


def remove_code_entries(folder: Path, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Remove entries that name code from the JSON files of an output folder.

    A file that cannot be parsed is deleted, since another parser may accept it.

    Args:
        config: content of config.json, which is not written yet.

    Returns:
        The content of config.json without those entries, and descriptions of all removed entries that are not
        diffquant's, such as "auto_map of tokenizer_config.json".
    """
    kept, named = _split_entries(json.dumps(config))
    left_out = [f"{key} of {_CONFIG}" for key in _keys(named)]
    for file in sorted(file for file in folder.iterdir() if file.name.casefold().endswith(".json")):
        try:
            content, found = _split_entries(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            file.unlink()
            left_out.append(f"{file.name}, which cannot be read")
            continue
        if found:
            write_atomically(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
            left_out += [f"{key} of {file.name}" for key in _keys(found)]
    return kept, left_out


def check_no_foreign_code(folder: Path, config: Mapping[str, Any], adapter: Adapter | None) -> None:
    """Check that a folder that engines will trust contains and names no code except diffquant's modelling file.

    The modelling file must be able to run the model and be identical to this version's, byte for byte. Configurations
    may name no other code, and the other files must be regular files without code.

    Raises:
        CheckpointError: one of these does not hold.
    """
    instead = f"leave out {option_name('implementation', 'folder')}"
    file = find_modelling_file(config, adapter)
    if adapter is None or not file:
        raise CheckpointError(
            f"{folder} has model_type {config.get('model_type')!r}, and diffquant has no modelling file for that: "
            f"{instead}"
        )
    if not (folder / file).exists():
        raise CheckpointError(f"{folder} has no modelling file: {instead}")
    ours = config_for_engines(config, adapter)
    problems = [
        f"{key} {json.dumps(config.get(key))} of {_CONFIG}"
        for key in ("architectures", "auto_map")
        if config.get(key) != ours[key]
    ]
    method = (config.get("quantization_config") or {}).get("quant_method", "compressed-tensors")
    if method != "compressed-tensors":
        problems.append(f"quant_method {json.dumps(method)} of {_CONFIG}")
    code = make_modelling_text(file, config["model_type"]).encode()
    for path in _entries(folder):
        problems += [f"{path.relative_to(folder)}{problem}" for problem in _find_problems(folder, path, file, code)]
    if problems:
        raise CheckpointError(
            f"{folder} contains or refers to code that is not this version of diffquant's, and "
            f"{option_name('implementation', 'folder')} would run it: {first_few(problems, ', ')}; use the plugin, "
            f"which is the default and runs none of it, or make the folder again with this version"
        )


def _find_problems(folder: Path, path: Path, modelling_file: str, code: bytes) -> Iterator[str]:
    """Yield the problems of a file or link in a trusted folder, as messages to append to its name."""
    name = path.name.casefold()
    if path.is_symlink() and not is_inside_folder_or_cache(folder, path):
        yield ", a link out of the folder"
    elif not path.is_file():
        yield ", which is not a regular file"
    elif path == folder / modelling_file:
        if path.stat().st_size != len(code) or path.read_bytes() != code:
            yield ""
    elif name.endswith(_MODULES):
        yield ""
    elif name.endswith(_PICKLES):
        yield ", a pickle"
    elif name.endswith(".json"):
        try:
            _, found = _split_entries(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            yield ", which cannot be read"
        else:
            if keys := _keys(found):
                yield f" with {', '.join(keys)}"


def _entries(folder: Path) -> Iterator[Path]:
    """Yield every file under a folder, and every link to a folder without following it."""

    def refuse(error: OSError) -> None:
        raise CheckpointError(f"cannot read {error.filename}: {error.strerror}") from error

    for place, folders, files in os.walk(folder, onerror=refuse):
        links = (name for name in folders if os.path.islink(os.path.join(place, name)))
        yield from (Path(place, name) for name in sorted([*links, *files]))


def _split_entries(text: str) -> tuple[Any, list[tuple[str, Any]]]:
    """Parse a JSON text and return its content without entries that name code, and those entries.

    Raises:
        ValueError: the text is not JSON.
        RecursionError: it is nested too deeply.
    """
    found: list[tuple[str, Any]] = []

    def keep(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        named = [pair for pair in pairs if _names_code(*pair)]
        found.extend(named)
        return dict(pairs) if not named else {key: value for key, value in pairs if not _names_code(key, value)}

    return json.loads(text, object_pairs_hook=keep), found


def _names_code(key: str, value: Any) -> bool:
    """Return whether a JSON entry makes a library that trusts the folder open a file or repository named by it."""
    # In a vocabulary these keys are tokens, and their values are numbers.
    if key in _NAMES:
        return isinstance(value, str | list | dict)
    if key.strip("_").removesuffix("_internal") in _KERNELS:
        return "/" in json.dumps(value)
    return key == "tokenizer_class" and isinstance(value, str | list | dict) and not _is_known_tokenizer(value)


def _is_known_tokenizer(name: Any) -> bool:
    """Return whether a tokenizer class is one of transformers', now or in an earlier release."""
    from transformers import PreTrainedTokenizerBase
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    found = tokenizer_class_from_name(name) if isinstance(name, str) else None
    if not isinstance(found, type):
        return False
    # A class whose dependencies are not installed is a stand-in.
    return found.__module__.startswith("transformers.utils.dummy_") or (
        found.__module__.startswith("transformers.") and issubclass(found, PreTrainedTokenizerBase)
    )


def _keys(found: list[tuple[str, Any]]) -> list[str]:
    """Return the distinct keys of entries that name code, except an `auto_map` of diffquant's."""
    ours = [("auto_map", make_auto_map(file)) for file in MODELLING_FILES]
    return list(dict.fromkeys(entry[0] for entry in found if entry not in ours))


def describe_removed_code(left_out: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Return messages about code of the source that was left out; empty if there was none.

    One message lists the code. Another explains why the tokenizer cannot be opened without it, if that is so.

    Args:
        left_out: removed code files, and descriptions of removed JSON entries that named code.
        folder: the output folder, after removal.
    """
    if not left_out:
        return ()
    notes = [f"left out, because it is code of the source or refers to code: {', '.join(map(one_line, left_out))}"]
    if any(entry.endswith(" of tokenizer_config.json") for entry in left_out):
        try:
            load_tokenizer(folder)
        except CheckpointError as error:
            why = str(error).removeprefix(f"cannot read a tokenizer from {folder}: ")
            notes.append(f"the tokenizer cannot be opened without what was left out: {why}")
    return tuple(notes)
