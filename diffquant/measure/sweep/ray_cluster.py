"""Measures a sweep's cells on a Ray cluster, with actors as workers. Imported only if requested."""

import os
import pickle
import secrets
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diffquant.errors import DiffQuantError, MissingDependencyError, UsageError
from diffquant.measure.sweep.cell import Run, Worker, check_same_environment
from diffquant.measure.sweep.workers import distribute_cells
from diffquant.support.names import option_name
from diffquant.support.progress import Progress


def require_ray() -> Any:
    """Import Ray.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError(f"{option_name('ray')} needs Ray: pip install 'diffquant[ray]'") from error
    return ray


def run_on_ray(run: Run, progress: Progress, address: str, workers: int | None = None) -> None:
    """Measure cells with workers on a Ray cluster, whose machines all see the models and the sweep's folder.

    Args:
        address: address of the cluster for `ray.init`; "auto" finds the one on this machine.
        workers: number of workers; by default one per GPU, or one per machine on CPUs.

    Raises:
        MissingDependencyError: Ray is not installed.
        UsageError: there is no such cluster, it lacks the resources for one worker, or machines cannot take part.
        DiffQuantError: the folder of the cells is gone.
    """
    ray = require_ray()
    with _connect(ray, address):
        size, resources = _share_out(ray, run, address, workers)
        size = min(size, len(run.cells))
        content = ray.put(pickle.dumps(run))
        actor = ray.remote(_Actor).options(max_restarts=0, **resources)

        def start(place: int) -> _Remote:
            return _Remote(ray, actor.remote(os.getcwd(), content), f"Ray's worker {place + 1}")

        first = {place: start(place) for place in range(size)}
        _check(ray, list(first.values()), run.cells[0].folder)
        distribute_cells(run, size, lambda place: first.pop(place, None) or start(place), progress)


@contextmanager
def _connect(ray: Any, address: str) -> Iterator[None]:
    try:
        ray.init(address=address, log_to_driver=True, logging_level="WARNING")
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"no Ray cluster at {address}: {reason}; start one with `ray start --head`") from error
    try:
        yield
    finally:
        ray.shutdown()


def _share_out(ray: Any, run: Run, address: str, workers: int | None) -> tuple[int, dict[str, float]]:
    """Choose the number of workers and the resources that Ray reserves for each.

    Raises:
        UsageError: the cluster lacks the resources for one worker.
    """
    if run.subject_of(run.cells[0]).device.startswith("cuda"):
        gpus = int(ray.cluster_resources().get("GPU", 0))
        if gpus < 1:
            raise UsageError(f"the Ray cluster at {address} has no GPU; use {option_name('device', 'cpu')}")
        return workers or gpus, {"num_gpus": 1, "num_cpus": 1}
    processors = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
    if max(processors, default=0) < 1:
        raise UsageError(f"the Ray cluster at {address} has no CPUs to compute on")
    size = workers or sum(count > 0 for count in processors)
    return size, {"num_cpus": max(1, min(int(sum(processors) / size), int(max(processors))))}


def _check(ray: Any, remotes: Sequence["_Remote"], folder: Path) -> None:
    """Check that every worker's machine sees the models and the folder, and would measure the same cells.

    Raises:
        UsageError: some do not; each is named.
    """
    beacon = folder / f"{secrets.token_hex(8)}.beacon"
    beacon.touch()
    try:
        asked = [remote.actor.why_unfit.remote(str(beacon)) for remote in remotes]
        wrong = [reason for reason in ray.get(asked) if reason]
    except ray.exceptions.RayActorError as error:
        raise DiffQuantError("workers die before they measure anything; use fewer if memory is short") from error
    finally:
        beacon.unlink(missing_ok=True)
    if wrong:
        raise UsageError("; ".join(dict.fromkeys(wrong)))


class _Remote:
    """The local handle of an actor on the cluster."""

    def __init__(self, ray: Any, actor: Any, name: str) -> None:
        self._ray, self.actor, self._name = ray, actor, name

    def measure(self, number: int, is_patient: bool) -> "Future[bool]":
        future: Future[bool] = self.actor.measure.remote(number, is_patient).future()
        return future

    def result(self, future: "Future[bool]") -> bool:
        try:
            return future.result()
        except self._ray.exceptions.RayActorError as error:
            raise BrokenExecutor(f"{self._name} died") from error
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from error

    def stop(self) -> None:
        self._ray.kill(self.actor)


class _Actor:
    """A worker on a machine of the cluster, whose run's relative paths start at the folder of the sweep's command."""

    def __init__(self, folder: str, run: bytes) -> None:
        self._folder, self._run = folder, run
        self._worker: Worker | None = None

    def measure(self, number: int, is_patient: bool) -> bool:
        if self._worker is None:
            self._worker = Worker(self._open_run())
        return self._worker.measure(number, is_patient)

    def why_unfit(self, beacon: str) -> str | None:
        """Return why this machine cannot take part, or None if it can."""
        host = socket.gethostname()
        try:
            run = self._open_run()
            if not Path(beacon).is_file():
                seen = run.cells[0].folder
                return f"{host} cannot read {seen}; put the folder on storage that all machines share"
            check_same_environment(run)
        except (DiffQuantError, OSError) as error:
            return f"{host} cannot take part: {error}; put the models on storage that all machines share"
        return None

    def _open_run(self) -> Run:
        try:
            os.chdir(self._folder)
        except OSError as error:
            raise DiffQuantError(f"it cannot read {self._folder}") from error
        run: Run = pickle.loads(self._run)
        return run
