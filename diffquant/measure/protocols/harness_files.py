"""Finds the local files on which a task's YAML file of lm-eval depends, without running anything.

A task depends on the YAML files that it includes, on the data files and folders in its fields, and, if a field is a
function, on all Python files in its folder. A group depends on all YAML files in its folder. Files to which any of
these files refer are included, too. An unnecessary file does little harm: if it changes, results are measured again.

Source: lm-eval 0.4.13, `tasks._yaml_loader` and `tasks._index`; datasets 5.2, `load.load_dataset`.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from diffquant.errors import UsageError
from diffquant.support.files import file_digest, read_bytes, read_text

_Config = dict[str, Any]
# Fields of data, whose paths are relative to the working directory.
_DATA = ("dataset_path", "data_files", "data_dir")
_MOST_VALUES = 100_000
_FUNCTION = "!function"
_CONSTANTS = re.compile(r"""["']([^"'\n]+)["']""")


class _Loader(yaml.SafeLoader):
    """A SafeLoader that also accepts `!function`, whose name it reads without importing anything."""


_Loader.add_constructor(_FUNCTION, lambda loader, node: loader.construct_scalar(node))  # type: ignore[arg-type]


@dataclass(frozen=True)
class TaskFiles:
    """All inputs of a task, or of a group of tasks.

    Attributes:
        yaml: absolute path of its YAML file.
    """

    yaml: Path

    @property
    def name(self) -> str:
        """The task's or group's name.

        Raises:
            UsageError: the YAML file has no name, or cannot be read.
        """
        own = _read_included(self.yaml)
        names = (config.get(key) for key in ("group", "task") for config in own.values())
        name = next((name for name in names if isinstance(name, str)), None)
        if name is None:
            raise UsageError(f"{self.yaml} names no task: it needs a line 'task: NAME'")
        return name

    def digests(self) -> dict[str, str]:
        """Return a digest of 16 hex digits for each input, by its path relative to the folder of the YAML file.

        Raises:
            UsageError: a file cannot be read, or the task's data do not exist.
        """
        inputs = {*self._configs, *self._data[0]} | {
            file for config in self._configs.items() for file in _named(*config)
        }
        try:
            if any(_FUNCTION in read_text(file) for file in self._configs):
                for module in self._in_folder("*.py"):
                    texts = _CONSTANTS.findall(read_text(module))
                    inputs |= {module, *(file for text in texts for file in _files_named(text, module.parent))}
            return {_path_from(self.yaml.parent, path): _digest(path) for path in sorted(inputs - {self.yaml})}
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{self.yaml} refers to a file that cannot be read: {error}") from error

    def untracked_inputs(self) -> list[str]:
        """Return descriptions of inputs that are not on this machine, such as "the dataset ORG/NAME on the hub".

        Changes to them are not noticed.
        """
        return self._data[1]

    @cached_property
    def _is_group(self) -> bool:
        return any(isinstance(config.get("task"), list) for config in _read_included(self.yaml).values())

    @cached_property
    def _configs(self) -> dict[Path, _Config]:
        """The fields of the task's file, of those that it includes and, for a group, of all others in its folder."""
        found = _read_included(self.yaml)
        if self._is_group:
            for file in self._in_folder("*.yaml"):
                # lm-eval skips such a file, too.
                with suppress(UsageError):
                    found |= _read_included(file)
        return found

    def _in_folder(self, pattern: str) -> list[Path]:
        folder = self.yaml.parent
        return sorted(
            file for file in folder.rglob(pattern) if all(map(_may_hold_data, file.relative_to(folder).parts))
        )

    @cached_property
    def _data(self) -> tuple[set[Path], list[str]]:
        """The data files and folders, and what is not on this machine.

        Raises:
            UsageError: data do not exist.
        """
        entries = [entry for config in self._configs.values() for entry in _mappings(config)]
        paths, patterns, folders = (
            [text for entry in entries for text in _flatten(entry.get(field))] for field in _DATA
        )
        found, absent = set[Path](), list[str]()
        unseen = ["what its custom_dataset fetches" for entry in entries if entry.get("custom_dataset")]
        for path in paths:
            if Path(path).is_dir():
                found.add(Path(path).absolute())
            elif path.startswith((".", "/", "~")):
                absent.append(path)
            elif "/" in path or not (patterns or folders):
                unseen.append(f"the dataset {path} on the hub")
        if not patterns:
            for folder in folders:
                found.add(place := Path(folder).expanduser().absolute())
                absent += [] if place.exists() else [folder]
        # "json" is a reader of `datasets`, but there may also be a folder with that name.
        bases = [Path(place).expanduser() for place in ("", *paths) if Path(place).is_dir()]
        for pattern in patterns:
            local = pattern.rpartition("::")[2]
            if "://" in local:
                unseen.append(local)
                continue
            places = [(base / folder).absolute() for base in bases for folder in folders or [""]]
            matches = _match_files(local, places)
            found |= matches
            absent += [] if matches else [f"{pattern}, looked for from {' and '.join(map(str, places))}"]
        # A group's folder may hold tasks that are not in it; lm-eval names what those that are lack.
        if absent and not self._is_group:
            raise UsageError(f"{self.yaml} refers to data that do not exist: {', '.join(absent)}")
        return found, list(dict.fromkeys(unseen))


def _read_included(file: Path, including: tuple[Path, ...] = ()) -> dict[Path, _Config]:
    """Read a YAML file's fields, and after them those of the files that it includes, which they override.

    Raises:
        UsageError: one cannot be read, or includes itself.
    """
    if file in including:
        raise UsageError(f"{file} includes itself")
    found = {file: _parse_yaml(file)}
    included = found[file].get("include", [])
    for name in reversed(included if isinstance(included, list) else [included]):
        found |= _read_included(Path(os.path.abspath(file.parent / str(name))), (*including, file))
    return found


def _parse_yaml(file: Path) -> _Config:
    try:
        loader = _Loader(read_bytes(file))
        node = loader.get_single_node()
        config = None if node is None else loader.construct_document(_checked_size(node))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"cannot read {file} as a task of lm-eval: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"cannot read {file} as a task of lm-eval: it has no fields")
    return config


def _checked_size(document: yaml.Node) -> yaml.Node:
    """Check that a document's aliases expand to a bounded number of values: lm-eval copies and writes all of them.

    Raises:
        ValueError: they expand to more values, or a value contains itself.
    """
    sizes: dict[int, int | None] = {}

    def size(node: yaml.Node) -> int:
        known = sizes.setdefault(id(node), 0)
        if known is None:
            raise ValueError("a value contains itself")
        if not known:
            sizes[id(node)] = None
            inner = node.value if isinstance(node, yaml.CollectionNode) else ()
            parts = (part for each in inner for part in (each if isinstance(each, tuple) else (each,)))
            sizes[id(node)] = known = 1 + sum(map(size, parts))
        return known

    if size(document) > max(_MOST_VALUES, len(sizes)):
        raise ValueError(f"its aliases (*name) stand for more than {_MOST_VALUES:,} values")
    return document


def _files_named(text: str, folder: Path) -> Iterator[Path]:
    """Yield the files that a text names, such as "prompts.yaml:short", in a folder or in the working directory."""
    if "\n" in text or len(text) > 1000 or not {".", "/"} & set(text):
        return
    for name in dict.fromkeys((text, text.partition(":")[0])):
        for place in (folder / name, Path(name)):
            try:
                if place.is_file():
                    yield Path(os.path.abspath(place))
            except (OSError, ValueError):
                continue


def _match_files(pattern: str, folders: list[Path]) -> set[Path]:
    """Find the files in any of these folders that match a pattern of data files."""
    from datasets.data_files import resolve_pattern

    found: set[Path] = set()
    for folder in folders:
        with suppress(FileNotFoundError):
            found |= set(map(Path, resolve_pattern(pattern, str(folder))))
    return found


def _named(file: Path, config: _Config) -> Iterator[Path]:
    """Yield the files that the fields of a YAML file name, apart from data."""
    for entry in _mappings(config):
        for key, value in entry.items():
            if key not in _DATA and not isinstance(value, dict):
                for text in _flatten(value):
                    yield from _files_named(text, file.parent)


def _mappings(value: object) -> Iterator[_Config]:
    """Yield all mappings in a value, itself included, but not those of data files by split."""
    if isinstance(value, dict):
        yield value
        value = [inner for key, inner in value.items() if key not in _DATA]
    for inner in value if isinstance(value, list) else ():
        yield from _mappings(inner)


def _flatten(value: object) -> Iterator[str]:
    """Yield the texts of a value, of its lists, and of its mappings, such as data files by split or {split, path}."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _flatten([value["path"]] if set(value) == {"split", "path"} else list(value.values()))
    for inner in value if isinstance(value, list) else ():
        yield from _flatten(inner)


def _path_from(folder: Path, path: Path) -> str:
    # On Windows there is no relative path between two drives.
    name = os.path.relpath(path, folder) if path.drive == folder.drive else str(path)
    return f"{name}/" if path.is_dir() else name


def _digest(path: Path) -> str:
    if path.is_file():
        return file_digest(path)[:16]
    whole = hashlib.sha256()
    for folder, inner, names in os.walk(path, followlinks=True):
        inner[:] = sorted(filter(_may_hold_data, inner))
        for name in sorted(names):
            file = Path(folder, name)
            whole.update(f"{file.relative_to(path).as_posix()} {file_digest(file)}\n".encode())
    return whole.hexdigest()[:16]


def _may_hold_data(folder: str) -> bool:
    return folder != "__pycache__" and not folder.startswith(".")
