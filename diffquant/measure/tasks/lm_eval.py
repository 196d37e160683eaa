"""Runs lm-eval's tasks: lm-eval makes the requests and computes the metrics, diffquant scores the requests."""

import importlib.metadata
import importlib.util
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from diffquant.errors import MissingDependencyError, UsageError
from diffquant.measure.results import ITEMS, TaskResult
from diffquant.measure.task import LIMIT, Task, TaskOption, read_positive_option
from diffquant.measure.tasks import register
from diffquant.support.files import check_regular_file, file_digest
from diffquant.support.installation import install_command
from diffquant.support.names import option_name
from diffquant.support.plain_data import JsonObject
from diffquant.support.progress import Progress

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

    from diffquant.measure.language_model import LanguageModel, ModelOutputs
    from diffquant.measure.protocols.harness_files import TaskFiles


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
            digests = _task_files(self.task).digests()
            # A task without further files has no such entry, which keeps the addresses of its cells.
            identity |= {"files": digests} if digests else {}
        return identity

    def untracked_inputs(self) -> list[str]:
        return (
            _task_files(self.task).untracked_inputs()
            if _is_file(self.task)
            else ["the data that lm-eval fetches for it"]
        )

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


def _task_files(task: str) -> "TaskFiles":
    # Its YAML reader is not needed for the command line's help.
    from diffquant.measure.protocols.harness_files import TaskFiles

    return TaskFiles(Path(task).absolute())


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

    from diffquant.measure.protocols.harness_files import TaskFiles

    file = Path(task).resolve()
    name = TaskFiles(file).name
    for each in file.parent.glob("**/*.yaml"):
        # lm-eval opens all of them.
        with suppress(FileNotFoundError, IsADirectoryError):
            check_regular_file(each)
    # Indexing lm-eval's own tasks takes many seconds, and the user's file does not need them.
    manager = TaskManager(include_path=str(file.parent), include_defaults=False)
    entry = manager.task_index.get(name)
    found = entry.get("yaml_path") if isinstance(entry, dict) else getattr(entry, "yaml_path", None)
    if found and Path(found).resolve() != file:
        raise UsageError(f"{found} defines {name} as well, and lm-eval would use it instead of {file}; rename one")
    return name, manager


@cache
def _all_tasks() -> "TaskManager":
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _is_file(task: str) -> bool:
    return task.endswith((".yaml", ".yml")) and Path(task).is_file()
