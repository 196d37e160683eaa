"""Addresses of cells: all that a result depends on, put together."""

from typing import TYPE_CHECKING

from diffquant.errors import CheckpointError
from diffquant.evals.task import Task
from diffquant.recipe import Recipe
from diffquant.support.code import code_digest
from diffquant.support.plain_data import JsonObject
from diffquant.sweep.claims import Claimant
from diffquant.sweep.work import Job, Work

if TYPE_CHECKING:
    from diffquant.sweep.session import Subject

# Changes with what a result holds, so that cells of an older form are measured again.
RESULT_FORMAT = 1

# A cell uses one task, one rounding and the formats of its schemes; the code of the others is not its own.
_PICKED_BY_NAME = ("diffquant.evals.tasks", "diffquant.numbers.formats", "diffquant.quantization.roundings")


def cell_key(subject: "Subject", recipe: Recipe, task: Task, identity: JsonObject) -> JsonObject:
    """All that a cell's result depends on.

    Args:
        identity: what `task.identity` gives, which may read a text.
    """
    modules = (*subject.modules(recipe), type(task).__module__)
    code = code_digest(modules, picking=_PICKED_BY_NAME)
    return subject.key(recipe) | {"format": RESULT_FORMAT, "task": identity, "code": code}


def check_alike(work: Work) -> None:
    """Check that a process computes what the one that planned the work would: same models, code and versions.

    Raises:
        CheckpointError: it does not; everything that differs is named.
    """
    differing = {name for batch in work.batches for name in _differences(batch.subject, batch.jobs[0])}
    if differing:
        raise CheckpointError(
            f"{Claimant.here().host} would measure other cells than were planned, since {', '.join(sorted(differing))} "
            "differ there; install the same versions, and use the same kind of device"
        )


def _differences(subject: "Subject", job: Job) -> list[str]:
    planned = job.cell.key
    own = cell_key(subject, job.point.recipe, job.task, planned["task"])
    return [name for name in own | planned if own.get(name) != planned.get(name)]
