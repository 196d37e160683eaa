"""Addresses of cells: everything that a result depends on, as one key."""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from diffquant.errors import CheckpointError
from diffquant.evals.task import Task
from diffquant.recipe import Recipe
from diffquant.support.code import code_digest
from diffquant.support.files import read_bytes
from diffquant.support.plain_data import JsonObject, parse_json
from diffquant.sweep.claims import Claimant
from diffquant.sweep.work import Job, Work

if TYPE_CHECKING:
    from diffquant.sweep.subject import Subject

# Raise it when results get new fields, so that older cells are measured again.
RESULT_FORMAT = 1

# A cell uses one task, one rounding and the formats of its schemes; changes to the others must not touch it.
_PICKED_BY_NAME = ("diffquant.evals.tasks", "diffquant.numbers.formats", "diffquant.quantization.roundings")


def cell_key(subject: "Subject", recipe: Recipe, task: Task, identity: JsonObject) -> JsonObject:
    """Everything that a cell's result depends on, as plain data.

    Args:
        identity: result of `task.identity`, passed in because computing it may read a text.
    """
    modules = (*subject.modules(recipe), type(task).__module__)
    code = code_digest(modules, picking=_PICKED_BY_NAME)
    return subject.key(recipe) | {"format": RESULT_FORMAT, "task": identity, "code": code}


def check_alike(work: Work) -> None:
    """Check that this process has the models, code and versions with which the work was planned.

    Raises:
        CheckpointError: something differs; the message names all of it.
    """
    differing = {name for batch in work.batches for name in _differences(batch[0])}
    if differing:
        raise CheckpointError(
            f"{Claimant.here().host} would measure other cells than were planned, since {', '.join(sorted(differing))} "
            "differ there; install the same versions, and use the same kind of device"
        )


def _differences(job: Job) -> list[str]:
    planned = job.cell.key
    own = cell_key(job.subject, job.point.recipe, job.task, planned["task"])
    return [name for name in own | planned if own.get(name) != planned.get(name)]


def why_again(folder: Path, missing: Sequence[JsonObject]) -> str | None:
    """Why cells are measured again, or None if the folder has no results for them from other code or versions.

    Args:
        missing: keys of the missing cells.
    """
    before = {_lasting(key): key for key in _keys_in(folder)}
    pairs = [(before[_lasting(key)], key) for key in missing if _lasting(key) in before]
    if not pairs:
        return None
    reasons = ["other code"] if any(old.get("code") != new["code"] for old, new in pairs) else []
    for old, new in pairs:
        was, now = old.get("versions", {}), new["versions"]
        reasons += [
            f"{name} {was.get(name, 'absent')}, which is {now.get(name, 'absent')} now"
            for name in {**was, **now}
            if was.get(name) != now.get(name)
        ]
    told = ", and by ".join(dict.fromkeys(reasons))
    return f"{len(pairs)} of the {len(missing)} missing cells were measured into {folder} before, by {told}"


def _lasting(key: JsonObject) -> str:
    """The parts of a key that an update of the code or its dependencies does not change."""
    return json.dumps({name: value for name, value in key.items() if name not in ("code", "versions")}, sort_keys=True)


def _keys_in(folder: Path) -> Iterator[JsonObject]:
    for file in sorted(folder.glob("*.json")):
        with suppress(OSError, ValueError, LookupError, TypeError):
            entry = parse_json(read_bytes(file))
            if "result" in entry and isinstance(entry["key"], dict):
                yield entry["key"]
