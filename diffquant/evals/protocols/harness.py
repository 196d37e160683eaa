"""The protocol of lm-eval's tasks: lm-eval makes the requests and the metrics, our scorer answers."""

import importlib.metadata
import importlib.util
import logging
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from diffquant.errors import MissingDependencyError, UsageError
from diffquant.evals.defaults import BATCH_TOKENS
from diffquant.evals.language_model import LanguageModel
from diffquant.evals.protocols.harness_files import TaskFiles
from diffquant.evals.task_result import TaskResult
from diffquant.support.files import check_plain, file_digest
from diffquant.support.installation import install_command
from diffquant.support.plain_data import JsonObject
from diffquant.support.progress import Progress, silent
from diffquant.support.spelling import spelled

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

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
    """Check that a task's YAML file may run code, unless it is one of lm-eval's own; says which code runs.

    Raises:
        UsageError: it is someone else's, and nobody said that it may.
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
            f"{spelled('trust_task', True)}"
        )
    logging.getLogger(__name__).warning("note: %s", what)


def task_identity(task: str) -> JsonObject:
    """Identity of a task: lm-eval's version, and the digests of its YAML file and of the files which that reads.

    Raises:
        UsageError: one of these files cannot be read.
    """
    identity: JsonObject = {"lm_eval": importlib.metadata.version("lm_eval")}
    if _is_file(task):
        identity["yaml"] = file_digest(Path(task))[:16]
        digests = TaskFiles.of(Path(task)).digests()
        # Cells of tasks that read nothing more have addresses without it.
        identity |= {"files": digests} if digests else {}
    return identity


def unseen(task: str) -> list[str]:
    """Inputs of a task that are not on this machine, so that `task_identity` cannot see them change."""
    return TaskFiles.of(Path(task)).unseen if _is_file(task) else ["the data that lm-eval fetches for it"]


def run_task(
    model: LanguageModel,
    task: str,
    limit: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress = silent,
) -> TaskResult:
    """Measure a task: all of its metrics, and the first preferred one item by item, by the task's first filter.

    Args:
        task: name that lm-eval knows, or path to the YAML file of a task or a group.
        limit: number of items of each subtask; None for all.

    Returns:
        The result; its details have `metrics`, all of them.

    Raises:
        MissingDependencyError: lm-eval is not installed.
        UsageError: lm-eval knows no such task, or it has no metric.
    """
    require_lm_eval()
    from lm_eval import simple_evaluate

    from diffquant.evals.protocols.harness_model import HarnessModel

    name, manager = _resolve(task)
    adapter = HarnessModel(model, batch_tokens, progress)
    try:
        output = simple_evaluate(
            model=adapter, tasks=[name], limit=limit, task_manager=manager, bootstrap_iters=0, log_samples=True
        )
    except KeyError as error:
        raise UsageError(f"lm-eval could not run task {task!r}: {error}") from error
    return _task_result(task, output)


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
    """The first filter of a task that has a metric: every filter has each document once more."""
    return next((str(sample["filter"]) for sample in samples if metric in sample), str(samples[0]["filter"]))


def _mean_reported(results: dict[str, JsonObject], leaves: list[str], metric: str) -> float:
    scores = [value for leaf in leaves for key, value in results[leaf].items() if key.split(",")[0] == metric]
    return float(sum(scores) / len(scores))


def _resolve(task: str) -> tuple[str, "TaskManager"]:
    if not _is_file(task):
        manager = _all_tasks()
        # lm-eval takes any other name for a path, whatever it ends in.
        if task not in manager.all_tasks:
            raise UsageError(f"lm-eval knows no task {task!r}, and it is not the path of a .yaml or .yml file")
        return task, manager
    from lm_eval.tasks import TaskManager

    file = Path(task).resolve()
    name = TaskFiles(file).name
    for each in file.parent.glob("**/*.yaml"):
        # lm-eval opens all of them.
        with suppress(FileNotFoundError, IsADirectoryError):
            check_plain(each)
    # lm-eval's own tasks take it many seconds to index; a file of one's own does not need them.
    manager = TaskManager(include_path=str(file.parent), include_defaults=False)
    entry = manager.task_index.get(name)
    found = entry.get("yaml_path") if isinstance(entry, dict) else getattr(entry, "yaml_path", None)
    if found and Path(found).resolve() != file:
        raise UsageError(f"{found} defines {name} as well, and lm-eval would take it in place of {file}; rename one")
    return name, manager


@cache
def _all_tasks() -> "TaskManager":
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _is_file(task: str) -> bool:
    return task.endswith((".yaml", ".yml")) and Path(task).is_file()
