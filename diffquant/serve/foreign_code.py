"""Finds what in a model's folder is, or names, code that is not diffquant's: refused where it would run, never written.

Told to trust a folder, transformers and vLLM run whatever its JSON files name: a module in the folder, a file beside
it, any path, or another repository. Some keys lead them to another model or configuration, which is then trusted too.

Sources: transformers 5.24, dynamic_module_utils.py, configuration_utils.py and models/auto; vLLM 0.32,
transformers_utils/config.py and model_executor/models/registry.py.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from diffquant.errors import CheckpointError
from diffquant.formats.folder import leads_inside
from diffquant.model.adapters import Adapter
from diffquant.serve.folder import AUTO_MAP, MODELLING_FILE, carries_modelling_file, config_for_engines, modelling_file
from diffquant.support.files import write_atomically
from diffquant.support.listing import first_few
from diffquant.support.spelling import spelled

# Keys whose value names a class in a file of Python, or another configuration or model to open instead.
REDIRECTS = ("configuration_files", "speculators_config")
_NAMES = ("auto_map", "custom_pipelines", "custom_generate", *REDIRECTS)
# Keys whose value may be a repository of compiled kernels, ORG/NAME.
_KERNELS = ("attn_implementation", "experts_implementation")
# What Python imports, or another loader runs; pickles run code when they are opened.
_MODULES = (".py", ".pyc", ".pyo", ".pyw", ".pyd", ".so", ".dll", ".dylib", ".pth", ".egg", ".whl")
_PICKLES = (".bin", ".pt", ".pt2", ".ckpt", ".pkl", ".pickle")
_CONFIG = "config.json"


def leave_out_code(folder: Path, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Take what names code of the source's out of the JSON files of a folder that is being written.

    A file that cannot be read is removed, since another reader may understand it.

    Args:
        config: what config.json is to hold, which is not written yet.

    Returns:
        That without what names code, and what was left out that is not diffquant's, such as "auto_map of
        tokenizer_config.json".
    """
    kept, named = _read(json.dumps(config))
    left_out = [f"{key} of {_CONFIG}" for key in _keys(named)]
    for file in sorted(file for file in folder.iterdir() if file.name.casefold().endswith(".json")):
        try:
            content, found = _read(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            file.unlink()
            left_out.append(f"{file.name}, which cannot be read")
            continue
        if found:
            write_atomically(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
            left_out += [f"{key} of {file.name}" for key in _keys(found)]
    return kept, left_out


def check_code(folder: Path, config: Mapping[str, Any], adapter: Adapter | None) -> None:
    """Check that nothing in a folder runs, or names, code that is not diffquant's, where engines trust the folder.

    Allowed are a model that the modelling file runs, that file byte for byte, configurations that name it alone, and
    other plain files that hold no code.

    Raises:
        CheckpointError: there is something else.
    """
    instead = f"leave out {spelled('implementation', 'folder')}"
    if adapter is None or not carries_modelling_file(config, adapter):
        raise CheckpointError(
            f"{folder} has model_type {config.get('model_type')!r}, and diffquant has no modelling file for that: "
            f"{instead}"
        )
    if not (folder / MODELLING_FILE).exists():
        raise CheckpointError(f"{folder} holds no modelling file: {instead}")
    ours = config_for_engines(config, adapter)
    problems = [
        f"{key} {json.dumps(config.get(key))} of {_CONFIG}"
        for key in ("architectures", "auto_map")
        if config.get(key) != ours[key]
    ]
    method = (config.get("quantization_config") or {}).get("quant_method", "compressed-tensors")
    if method != "compressed-tensors":
        problems.append(f"quant_method {json.dumps(method)} of {_CONFIG}")
    code = modelling_file(config["model_type"]).encode()
    for path in _entries(folder):
        problems += [f"{path.relative_to(folder)}{problem}" for problem in _problems(folder, path, code)]
    if problems:
        raise CheckpointError(
            f"{folder} holds code that is not this diffquant's, or names some, and "
            f"{spelled('implementation', 'folder')} would run it: {first_few(problems, ', ')}; the plugin, which is "
            "the default, runs none of it; or make the folder again by this diffquant"
        )


def _problems(folder: Path, path: Path, code: bytes) -> Iterator[str]:
    """What is wrong with a file or a link of a trusted folder, to be put behind its name."""
    name = path.name.casefold()
    if path.is_symlink() and not leads_inside(folder, path):
        yield ", a link out of the folder"
    elif not path.is_file():
        yield ", which is no plain file"
    elif path == folder / MODELLING_FILE:
        if path.stat().st_size != len(code) or path.read_bytes() != code:
            yield ""
    elif name.endswith(_MODULES):
        yield ""
    elif name.endswith(_PICKLES):
        yield ", a pickle"
    elif name.endswith(".json"):
        try:
            _, found = _read(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            yield ", which cannot be read"
        else:
            if keys := _keys(found):
                yield f" with {', '.join(keys)}"


def _entries(folder: Path) -> Iterator[Path]:
    """Every file under a folder, and every link to a folder, which is not followed."""

    def refuse(error: OSError) -> None:
        raise CheckpointError(f"cannot look into {error.filename}: {error.strerror}") from error

    for place, folders, files in os.walk(folder, onerror=refuse):
        links = (name for name in folders if os.path.islink(os.path.join(place, name)))
        yield from (Path(place, name) for name in sorted([*links, *files]))


def _read(text: str) -> tuple[Any, list[tuple[str, Any]]]:
    """What a JSON text holds beside entries that name code, and those, all that share a name included.

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
    """Whether an entry of a JSON file makes a reader that trusts the folder open something that it names."""
    # Numbers are ids of a vocabulary's words.
    if key in _NAMES:
        return isinstance(value, str | list | dict)
    if key.strip("_").removesuffix("_internal") in _KERNELS:
        return "/" in json.dumps(value)
    return key == "tokenizer_class" and isinstance(value, str | list | dict) and not _is_known_tokenizer(value)


def _is_known_tokenizer(name: Any) -> bool:
    """Whether transformers has a tokenizer's class, or had it in an earlier release."""
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
    """Keys of entries that name code, except diffquant's own."""
    return list(dict.fromkeys(key for key, value in found if (key, value) != ("auto_map", AUTO_MAP)))
