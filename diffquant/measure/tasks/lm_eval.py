"""Runs lm-eval's tasks: lm-eval makes the requests and computes the metrics, diffquant scores the requests."""

import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from diffquant.errors import MissingDependencyError, UsageError
from diffquant.measure.results import ITEMS, TaskResult
from diffquant.measure.task import LIMIT, Task, TaskOption, read_positive_option
from diffquant.measure.tasks import register
from diffquant.support.files import check_regular_file, file_digest, read_text
from diffquant.support.installation import install_command
from diffquant.support.names import option_name
from diffquant.support.plain_data import JsonObject
from diffquant.support.progress import Progress

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

    from diffquant.measure.language_model import LanguageModel, ModelOutputs


TRUST_TASK = TaskOption(
    "trust_task", False, "Allow a task's YAML file from outside lm-eval to run code in its templates.", bool
)


@register
@dataclass(frozen=True, kw_only=True)
class Harness(Task):
    """A task of lm-eval.

    Attributes:
        task: name of a task in lm-eval, or path of the YAML file of a task or a group of tasks.
        limit: number of items of each subtask, or None to take all.
    """

    kind: ClassVar = "lm-eval"
    usage: ClassVar = "lm-eval:NAME"
    options: ClassVar = (LIMIT, TRUST_TASK)
    columns: ClassVar = ITEMS

    task: str
    limit: int | None

    @classmethod
    def parse(cls, name: str, values: Mapping[str, object], batch_tokens: int) -> Self:
        _, _, task = name.partition(":")
        if not task:
            raise cls.make_name_error(name)
        require_lm_eval()
        require_trust(task, bool(TRUST_TASK.value_in(values)))
        return cls(task=task, limit=read_positive_option(LIMIT, values), batch_tokens=batch_tokens)

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.task}"

    def identity(self) -> JsonObject:
        identity: JsonObject = {"name": self.name, "limit": self.limit, "batch_tokens": self.batch_tokens}
        identity["lm_eval"] = importlib.metadata.version("lm_eval")
        if _is_file(self.task):
            identity["yaml"] = file_digest(Path(self.task))[:16]
            digests = {_path_from(Path(self.task), path): _digest(path) for path in _list_inputs(Path(self.task))[0]}
            # A task without further files has no such entry, which keeps the addresses of its cells.
            identity |= {"files": digests} if digests else {}
        return identity

    def untracked_inputs(self) -> list[str]:
        return _list_inputs(Path(self.task))[1] if _is_file(self.task) else ["the data that lm-eval fetches for it"]

    def run(self, model: "LanguageModel", reference: "ModelOutputs | None", progress: Progress) -> TaskResult:  # noqa: ARG002
        """Run the task, and return all of its metrics.

        The score is the first of acc_norm, acc, exact_match, f1 and word_perplexity that the task has, computed with
        the task's first filter of lm-eval. `values` has it for each item, if lm-eval computes it for single items.

        Raises:
            MissingDependencyError: lm-eval is not installed.
            UsageError: lm-eval has no such task, or the task has none of these metrics.
        """
        require_lm_eval()
        from lm_eval import simple_evaluate

        from diffquant.measure.protocols.harness_plugin import HarnessModel

        name, manager = _resolve(self.task)
        adapter = HarnessModel(model, self.batch_tokens, progress)
        try:
            output = simple_evaluate(
                model=adapter, tasks=[name], limit=self.limit, task_manager=manager, bootstrap_iters=0, log_samples=True
            )
        except KeyError as error:
            raise UsageError(f"lm-eval could not run task {self.task!r}: {error}") from error
        return _task_result(self.task, output)


# The metric a table shows, where a task has several.
_PREFERRED = ("acc_norm", "acc", "exact_match", "f1", "word_perplexity")


def require_lm_eval() -> None:
    """Check that lm-eval can be imported, without importing it.

    Raises:
        MissingDependencyError: it is not installed.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise MissingDependencyError(f"lm-eval tasks need the lm-eval package: {install_command('peers')}")


def require_trust(task: str, is_trusted: bool) -> None:
    """Check that the user trusts a task whose YAML file is not part of lm-eval, since lm-eval runs code from it.

    If the user trusts it, log a warning that names the file. Tasks of lm-eval are always trusted.

    Args:
        task: name of a task, or path of its YAML file.
        is_trusted: whether the user trusts the file.

    Raises:
        UsageError: the file is not part of lm-eval, and `is_trusted` is False.
    """
    if not _is_file(task):
        return
    places = map(Path, importlib.util.find_spec("lm_eval").submodule_search_locations or ())  # type: ignore[union-attr]
    if any(Path(task).resolve().is_relative_to(place.resolve()) for place in places):
        return
    what = f"lm-eval runs the templates and functions of {task}, and of the files that it includes, as code"
    if not is_trusted:
        raise UsageError(
            f"{what}, which can do anything on this machine: read them, and if you trust them give "
            f"{option_name('trust_task', True)}"
        )
    logging.getLogger(__name__).warning("note: %s", what)


def _task_result(task: str, output: JsonObject) -> TaskResult:
    results, samples = output["results"], output["samples"]
    metrics = {f"{name}/{key}": value for name, row in results.items() for key, value in row.items()}
    leaves = sorted(samples)
    names = {
        key.split(",")[0] for leaf in leaves for key, value in results[leaf].items() if isinstance(value, int | float)
    }
    metric = next((name for name in _PREFERRED if name in names), None)
    if metric is None:
        raise UsageError(f"lm-eval task {task!r} has none of the metrics {', '.join(_PREFERRED)}; it has {names}")
    filters = {leaf: _first_filter(samples[leaf], metric) for leaf in leaves}
    documents = [each for leaf in leaves for each in samples[leaf] if each["filter"] == filters[leaf]]
    values = [document[metric] for document in documents if metric in document]
    per_item = [float(value) for value in values if isinstance(value, int | float)]
    by_item = len(per_item) == len(values) and bool(values)
    return TaskResult(
        metric=metric,
        score=sum(per_item) / len(per_item) if by_item else _mean_reported(results, leaves, metric),
        n=len(documents),
        values=per_item if by_item else None,
        details={"metrics": {key: value for key, value in metrics.items() if isinstance(value, int | float)}},
    )


def _first_filter(samples: list[JsonObject], metric: str) -> str:
    """Return the first filter of a task that has a metric, since every filter repeats each document."""
    return next((str(sample["filter"]) for sample in samples if metric in sample), str(samples[0]["filter"]))


def _mean_reported(results: dict[str, JsonObject], leaves: list[str], metric: str) -> float:
    scores = [value for leaf in leaves for key, value in results[leaf].items() if key.split(",")[0] == metric]
    return float(sum(scores) / len(scores))


def _resolve(task: str) -> tuple[str, "TaskManager"]:
    if not _is_file(task):
        manager = _all_tasks()
        # lm-eval takes any other name for a path, whatever it ends in.
        if task not in manager.all_tasks:
            raise UsageError(f"lm-eval has no task {task!r}, and it is not the path of a .yaml or .yml file")
        return task, manager
    from lm_eval.tasks import TaskManager

    file = Path(task).resolve()
    for each in file.parent.glob("**/*.yaml"):
        # lm-eval opens all of them.
        with suppress(FileNotFoundError, IsADirectoryError):
            check_regular_file(each)
    # Indexing lm-eval's own tasks takes many seconds, and the user's file does not need them.
    manager = TaskManager(include_path=str(file.parent), include_defaults=False)
    for name, entry in manager.task_index.items():
        found = entry.get("yaml_path") if isinstance(entry, dict) else getattr(entry, "yaml_path", None)
        if found and Path(found).resolve() == file:
            return name, manager
    raise UsageError(
        f"lm-eval finds no task in {file}: it needs a line 'task: NAME' with a name that no other file there has"
    )


@cache
def _all_tasks() -> "TaskManager":
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _is_file(task: str) -> bool:
    return task.endswith((".yaml", ".yml")) and Path(task).is_file()


# Fields of data whose value may be a folder's bare name, and a task that is a list: a group.
_FOLDERS = re.compile(r"(?:dataset_path|data_dir):\s*[\"']?([\w./~-]+)")
_GROUP = re.compile(r"^task:\s*(\[|$)", re.MULTILINE)
_CODE = (".yaml", ".yml", ".py")


def _list_inputs(task: Path) -> tuple[list[Path], list[str]]:
    """List what a task's YAML file depends on, without running anything.

    These are the files and folders that it or a file of code that it names mentions, and if it has functions or is a
    group, all code and YAML files in its folder. A file too many only means that results are measured again when it
    changes.

    Returns:
        Files and folders of this machine, and data that is elsewhere, whose changes are not noticed.

    Raises:
        UsageError: one of the files cannot be read.
    """
    task = task.absolute()
    found, code, elsewhere = set[Path](), [task], list[str]()
    while code:
        file = code.pop()
        try:
            text = read_text(file)
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{task} refers to a file that cannot be read: {error}") from error
        named = set(_find_named(text, file.parent))
        if file.suffix != ".py":
            folders = [(name, Path(name).expanduser()) for name in _FOLDERS.findall(text)]
            named |= {place.absolute() for _, place in folders if place.exists()}
            elsewhere += [
                f"the dataset {name} on the hub" for name, place in folders if "/" in name and not place.exists()
            ]
            elsewhere += re.findall(r"\w+://[^\s'\"},]+", text)
        if "!function" in text or _GROUP.search(text):
            named |= {each for each in task.parent.rglob("*") if each.suffix in _CODE and _may_hold_data(each.name)}
        code += [path for path in named - found - {task} if path.suffix in _CODE and path.is_file()]
        found |= named
    return sorted(found - {task}), list(dict.fromkeys(elsewhere))


def _find_named(text: str, folder: Path) -> Iterator[Path]:
    """Yield the files and folders that words of a text name, in a folder or in the working directory."""
    for word in set(re.findall(r"[^\s'\"{}\[\],:]{2,1000}", text)):
        for place in (folder, Path()):
            with suppress(OSError, ValueError, NotImplementedError):
                if "*" in word:
                    yield from (each.absolute() for each in place.glob(word) if each.is_file())
                elif {".", "/"} & set(word) and set(word) - {".", "/"} and (place / word).exists():
                    yield Path(os.path.abspath(place / word))


def _path_from(task: Path, path: Path) -> str:
    # On Windows there is no relative path between two drives.
    folder = task.absolute().parent
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
