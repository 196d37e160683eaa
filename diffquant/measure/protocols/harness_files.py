"""Finds the local files that a task's YAML file refers to, by the rules of lm-eval and `datasets`.

Source: lm-eval 0.4.13, `tasks._yaml_loader` and `tasks._index`; datasets 5.2, `load.load_dataset`.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from diffquant.errors import UsageError
from diffquant.measure.protocols.imported_files import imported_files, list_texts, module_file
from diffquant.support.files import file_digest, read_bytes

_Config = dict[str, Any]
# Folders that hold no data.
_PASSED_OVER = {"__pycache__", ".git", ".ipynb_checkpoints"}
_MOST_VALUES = 100_000


@dataclass
class TaskFiles:
    """All inputs of a task, found by following the references in its YAML file.

    Attributes:
        yaml: file of the task, or of a group of tasks.
        files: local files and folders that it reads, apart from `yaml`.
        unseen: inputs that are not on this machine, so that changes to them are not noticed, such as a dataset on the
            hub.
    """

    yaml: Path
    files: set[Path] = field(default_factory=set)
    unseen: list[str] = field(default_factory=list)
    _merged: dict[Path, _Config] = field(default_factory=dict)

    @classmethod
    def of(cls, yaml: Path) -> "TaskFiles":
        """Find the inputs of the task in a YAML file.

        Raises:
            UsageError: the file or one that it includes cannot be read, or data that it names do not exist.
        """
        found = cls(yaml.absolute())
        try:
            found._follow(found.config)
        except RecursionError as error:
            raise UsageError(f"cannot read {yaml} as a task of lm-eval: it is nested too deeply") from error
        found.files.discard(found.yaml)
        return found

    @property
    def name(self) -> str:
        """The task's or group's name.

        Raises:
            UsageError: the file has none.
        """
        name = self.config.get("group") or self.config.get("task")
        if not isinstance(name, str):
            raise UsageError(f"{self.yaml} names no task: it needs a line 'task: NAME'")
        return name

    @cached_property
    def config(self) -> _Config:
        return self._read(self.yaml, ())

    def digests(self) -> dict[str, str]:
        """Return a digest of 16 hex digits for each file and folder, by its path relative to the task's folder."""
        try:
            return {_path_from(self.yaml.parent, path): _digest(path) for path in sorted(self.files)}
        except OSError as error:
            raise UsageError(f"{self.yaml} refers to a file that cannot be read: {error}") from error

    def _read(self, file: Path, including: tuple[Path, ...]) -> _Config:
        """Read a YAML file's fields, which override those of the files that it includes."""
        if file in including:
            raise UsageError(f"{file} includes itself")
        if file in self._merged:
            return self._merged[file]
        self.files.add(file)
        config = _parse_yaml(file)
        included = config.pop("include", [])
        merged: _Config = {}
        for name in included if isinstance(included, list) else [included]:
            merged |= self._read(Path(os.path.abspath(file.parent / str(name))), (*including, file))
        self._merged[file] = merged | config
        return self._merged[file]

    def _follow(self, config: _Config) -> None:
        """Record the inputs that the fields of a task, a group or a group's member refer to."""
        for key, value in config.items():
            if key not in ("dataset_path", "dataset_kwargs", "task"):
                self._follow_values(value)
        if config.get("dataset_path") or config.get("custom_dataset"):
            self._follow_data(config)
        members = config.get("task")
        for member in members if isinstance(members, list) else []:
            # A group's fields override those in a member's file; fields given for a member in the group override both.
            fields = _without_names(config) | (member if isinstance(member, dict) else {"task": member})
            defining = self._find_definitions(fields.get("group") or fields.get("task"))
            if not defining:
                self._follow(fields)
            for file in defining:
                if file not in self.files:
                    self._follow(self._read(file, ()) | _without_names(fields))

    def _follow_values(self, value: object) -> None:
        # A function, given by its name and the folder in which to look for its module.
        if isinstance(value, tuple) and isinstance(value[1], Path):
            self._follow_function(*value)
        elif isinstance(value, str):
            self.files |= set(_files_named(value, self.yaml.parent))
        elif isinstance(value, dict | list):
            for inner in value.values() if isinstance(value, dict) else value:
                self._follow_values(inner)

    def _follow_function(self, name: str, folder: Path) -> None:
        file = module_file(name.rpartition(".")[0], folder)
        for module in imported_files(file) if file else []:
            self.files.add(module)
            for text in list_texts(module):
                self.files |= set(_files_named(text, module.parent))

    def _follow_data(self, config: _Config) -> None:
        path, arguments = str(config.get("dataset_path")), config.get("dataset_kwargs") or {}
        patterns, folder = arguments.get("data_files"), arguments.get("data_dir")
        if config.get("custom_dataset"):
            self.unseen.append("what its custom_dataset fetches")
        elif Path(path).is_dir():
            self.files.add(Path(path).absolute())
        elif path.startswith((".", "/", "~")):
            raise UsageError(f"{self.yaml} refers to data that do not exist: {path}")
        elif "/" in path or not (patterns or folder):
            self.unseen.append(f"the dataset {path} on the hub")
            return
        elif folder and not patterns:
            self.files.add(_require_existing(Path(folder).expanduser().absolute(), self.yaml))
        # "json" is a reader of `datasets`, but there may also be a folder with that name.
        bases = [Path(place, folder or "").expanduser().absolute() for place in ("", path) if Path(place).is_dir()]
        for pattern in _flatten(patterns):
            local = pattern.rpartition("::")[2]
            if "://" in local:
                self.unseen.append(local)
            else:
                self.files |= set(_match_files(local, bases, self.yaml))
        self._follow_values({key: value for key, value in arguments.items() if key not in ("data_files", "data_dir")})

    def _find_definitions(self, name: object) -> list[Path]:
        """Find the task folder's files that define a member of a group: a task, a group, or all tasks of a tag."""
        return [file for file, names in self._names_by_file.items() if name in names]

    @cached_property
    def _names_by_file(self) -> dict[Path, set[str]]:
        names = {}
        for file in sorted(self.yaml.parent.glob("**/*.yaml")):
            try:
                config = TaskFiles(file).config
            except UsageError:
                # lm-eval skips such a file, too.
                continue
            tags = config.get("tag") or []
            given = [config.get("task"), config.get("group"), *(tags if isinstance(tags, list) else [tags])]
            names[file] = {name for name in given if isinstance(name, str)}
        return names


def _without_names(config: _Config) -> _Config:
    return {key: value for key, value in config.items() if key not in ("task", "group")}


def _parse_yaml(file: Path) -> _Config:
    class Loader(yaml.SafeLoader):
        """A SafeLoader that also accepts `!function`, of which it records the name without importing anything."""

    def function(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> tuple[str, Path]:
        return str(loader.construct_scalar(node)), file.parent

    Loader.add_constructor("!function", function)
    try:
        loader = Loader(read_bytes(file))
        node = loader.get_single_node()
        config = None if node is None else loader.construct_document(_checked_size(node))
    except (OSError, ValueError, yaml.YAMLError) as error:
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


def _match_files(pattern: str, folders: Sequence[Path], yaml: Path) -> list[Path]:
    """Find the files in any of these folders that match a pattern of data files."""
    from datasets.data_files import resolve_pattern

    found: list[Path] = []
    for folder in folders:
        with suppress(FileNotFoundError):
            found += map(Path, resolve_pattern(pattern, str(folder)))
    if not found:
        places = " and ".join(map(str, folders))
        raise UsageError(f"{yaml} refers to data that do not exist: {pattern}, looked for from {places}")
    return found


def _require_existing(path: Path, yaml: Path) -> Path:
    if not path.exists():
        raise UsageError(f"{yaml} refers to data that do not exist: {path}")
    return path


def _flatten(patterns: object) -> list[str]:
    """Return file patterns as a flat list, whether given as a text, a list, by split, or as splits with paths."""
    if isinstance(patterns, dict):
        named = [patterns["path"]] if set(patterns) == {"split", "path"} else list(patterns.values())
        return [text for each in named for text in _flatten(each)]
    if isinstance(patterns, list):
        return [text for each in patterns for text in _flatten(each)]
    return [str(patterns)] if patterns else []


def _path_from(folder: Path, path: Path) -> str:
    # On Windows there is no relative path between two drives.
    name = os.path.relpath(path, folder) if path.drive == folder.drive else str(path)
    return f"{name}/" if path.is_dir() else name


def _digest(path: Path) -> str:
    if path.is_file():
        return file_digest(path)[:16]
    whole = hashlib.sha256()
    for folder, inner, names in os.walk(path, followlinks=True):
        inner[:] = sorted(name for name in inner if name not in _PASSED_OVER)
        for name in sorted(names):
            file = Path(folder, name)
            whole.update(f"{file.relative_to(path).as_posix()} {file_digest(file)}\n".encode())
    return whole.hexdigest()[:16]
