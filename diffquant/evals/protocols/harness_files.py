"""The files of this machine that a task's YAML file reads, as lm-eval and `datasets` find them.

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
from diffquant.evals.protocols.imported_files import imported_files, module_file, texts_in
from diffquant.support.files import file_digest, read_bytes

_Config = dict[str, Any]
# Folders that hold no data.
_PASSED_OVER = {"__pycache__", ".git", ".ipynb_checkpoints"}
_MOST_VALUES = 100_000


@dataclass(frozen=True)
class _Function:
    """A function that a YAML file names, with the folder that its module is looked for in."""

    name: str
    folder: Path


@dataclass
class TaskFiles:
    """All that a task reads, found by following its YAML file.

    Attributes:
        yaml: file of the task, or of a group of tasks.
        files: files and folders of this machine that it reads beside that.
        unseen: what it reads elsewhere, whose changes nobody here can see, such as a data set of the hub.
    """

    yaml: Path
    files: set[Path] = field(default_factory=set)
    unseen: list[str] = field(default_factory=list)
    _merged: dict[Path, _Config] = field(default_factory=dict)

    @classmethod
    def of(cls, yaml: Path) -> "TaskFiles":
        """Follow a YAML file.

        Raises:
            UsageError: it, or what it includes, cannot be read, or data that it names are not there.
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
        """16 hex digits for each file and folder, by its path from the task's folder."""
        try:
            return {_path_from(self.yaml.parent, path): _digest(path) for path in sorted(self.files)}
        except OSError as error:
            raise UsageError(f"{self.yaml} reads what cannot be read: {error}") from error

    def _read(self, file: Path, including: tuple[Path, ...]) -> _Config:
        """A YAML file's fields, those that it includes under its own."""
        if file in including:
            raise UsageError(f"{file} includes itself")
        if file in self._merged:
            return self._merged[file]
        self.files.add(file)
        config = _parsed(file)
        included = config.pop("include", [])
        merged: _Config = {}
        for name in included if isinstance(included, list) else [included]:
            merged |= self._read(Path(os.path.abspath(file.parent / str(name))), (*including, file))
        self._merged[file] = merged | config
        return self._merged[file]

    def _follow(self, config: _Config) -> None:
        """Note what a task's, a group's or a member's fields name."""
        for key, value in config.items():
            if key not in ("dataset_path", "dataset_kwargs", "task"):
                self._follow_values(value)
        if config.get("dataset_path") or config.get("custom_dataset"):
            self._follow_data(config)
        members = config.get("task")
        for member in members if isinstance(members, list) else []:
            # A group's fields stand in place of its members' own, and a member's in the group in place of both.
            fields = _without_names(config) | (member if isinstance(member, dict) else {"task": member})
            defining = self._defining(fields.get("group") or fields.get("task"))
            if not defining:
                self._follow(fields)
            for file in defining:
                if file not in self.files:
                    self._follow(self._read(file, ()) | _without_names(fields))

    def _follow_values(self, value: object) -> None:
        if isinstance(value, _Function):
            self._follow_function(value)
        elif isinstance(value, str):
            self.files |= set(_files_named(value, self.yaml.parent))
        elif isinstance(value, dict | list):
            for inner in value.values() if isinstance(value, dict) else value:
                self._follow_values(inner)

    def _follow_function(self, function: _Function) -> None:
        file = module_file(function.name.rpartition(".")[0], function.folder)
        for module in imported_files(file) if file else []:
            self.files.add(module)
            for text in texts_in(module):
                self.files |= set(_files_named(text, module.parent))

    def _follow_data(self, config: _Config) -> None:
        path, arguments = str(config.get("dataset_path")), config.get("dataset_kwargs") or {}
        patterns, folder = arguments.get("data_files"), arguments.get("data_dir")
        if config.get("custom_dataset"):
            self.unseen.append("what its custom_dataset fetches")
        elif Path(path).is_dir():
            self.files.add(Path(path).absolute())
        elif path.startswith((".", "/", "~")):
            raise UsageError(f"{self.yaml} reads data that are not there: {path}")
        elif "/" in path or not (patterns or folder):
            self.unseen.append(f"the data set {path} of the hub")
            return
        elif folder and not patterns:
            self.files.add(_existing(Path(folder).expanduser().absolute(), self.yaml))
        # A folder may be called "json", which is a reader of `datasets`, too.
        bases = [Path(place, folder or "").expanduser().absolute() for place in ("", path) if Path(place).is_dir()]
        for pattern in _flat(patterns):
            local = pattern.rpartition("::")[2]
            if "://" in local:
                self.unseen.append(local)
            else:
                self.files |= set(_matching(local, bases, self.yaml))
        self._follow_values({key: value for key, value in arguments.items() if key not in ("data_files", "data_dir")})

    def _defining(self, name: object) -> list[Path]:
        """The files of the task's folder that define a member of a group: a task, a group, or all tasks of a tag."""
        return [file for file, names in self._names_by_file.items() if name in names]

    @cached_property
    def _names_by_file(self) -> dict[Path, set[str]]:
        names = {}
        for file in sorted(self.yaml.parent.glob("**/*.yaml")):
            try:
                config = TaskFiles(file).config
            except UsageError:
                # lm-eval passes over it, too.
                continue
            tags = config.get("tag") or []
            given = [config.get("task"), config.get("group"), *(tags if isinstance(tags, list) else [tags])]
            names[file] = {name for name in given if isinstance(name, str)}
        return names


def _without_names(config: _Config) -> _Config:
    return {key: value for key, value in config.items() if key not in ("task", "group")}


def _parsed(file: Path) -> _Config:
    class Loader(yaml.SafeLoader):
        """Safe, but for functions, which it takes down by name."""

    def function(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> _Function:
        return _Function(str(loader.construct_scalar(node)), file.parent)

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
    """The document, whose aliases stand for a bounded number of values: lm-eval copies and writes all of them.

    Raises:
        ValueError: they stand for more, or a value holds itself.
    """
    sizes: dict[int, int | None] = {}

    def size(node: yaml.Node) -> int:
        known = sizes.setdefault(id(node), 0)
        if known is None:
            raise ValueError("a value holds itself")
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
    """The files that a text names, such as "prompts.yaml:short": from a folder, or from where the command runs."""
    if "\n" in text or len(text) > 1000 or not {".", "/"} & set(text):
        return
    for name in dict.fromkeys((text, text.partition(":")[0])):
        for place in (folder / name, Path(name)):
            try:
                if place.is_file():
                    yield Path(os.path.abspath(place))
            except (OSError, ValueError):
                continue


def _matching(pattern: str, folders: Sequence[Path], yaml: Path) -> list[Path]:
    """The files that a pattern of data means, from any of some folders."""
    from datasets.data_files import resolve_pattern

    found: list[Path] = []
    for folder in folders:
        with suppress(FileNotFoundError):
            found += map(Path, resolve_pattern(pattern, str(folder)))
    if not found:
        places = " and ".join(map(str, folders))
        raise UsageError(f"{yaml} reads data that are not there: {pattern}, looked for from {places}")
    return found


def _existing(path: Path, yaml: Path) -> Path:
    if not path.exists():
        raise UsageError(f"{yaml} reads data that are not there: {path}")
    return path


def _flat(patterns: object) -> list[str]:
    """Patterns of files, however they are given: a text, a list, by split, or a list of splits with their paths."""
    if isinstance(patterns, dict):
        named = [patterns["path"]] if set(patterns) == {"split", "path"} else list(patterns.values())
        return [text for each in named for text in _flat(each)]
    if isinstance(patterns, list):
        return [text for each in patterns for text in _flat(each)]
    return [str(patterns)] if patterns else []


def _path_from(folder: Path, path: Path) -> str:
    # Between two drives of Windows there is no way.
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
