"""The engine for a Ray cluster: Ray runs the workers as its tasks. Imported only when asked for."""

import os
import pickle
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diffquant.errors import DiffQuantError, MissingDependencyError, UsageError
from diffquant.support.progress import Progress
from diffquant.support.spelling import spelled
from diffquant.sweep.claims import Claimant
from diffquant.sweep.crew import End, Member, keep_at_work
from diffquant.sweep.work import Work
from diffquant.sweep.worker import Worker

# Seconds that a worker gets to release its claim.
_TIME_TO_STOP = 10.0


def require_ray() -> Any:
    """Import Ray.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError(f"{spelled('ray')} needs Ray: pip install 'diffquant[ray]'") from error
    return ray


def run_on_ray(work: Work, progress: Progress, address: str, workers: int | None = None) -> None:
    """Measure cells with workers on a Ray cluster, whose machines all see the models and the sweep's folder.

    Args:
        address: address of the cluster as `ray.init` takes it; "auto" finds the one on this machine.
        workers: number of workers; by default one per GPU, or one per machine on CPUs.

    Raises:
        MissingDependencyError: Ray is not installed.
        UsageError: there is no such cluster, it has too little for one worker, or machines cannot take part.
        DiffQuantError: the folder of the cells is gone, or no worker is left that could measure them.
    """
    ray = require_ray()
    with _connected(ray, address):
        nodes = [node for node in ray.nodes() if node["Alive"]]
        _check_nodes(ray, nodes, work)
        size, resources = _share_out(ray, nodes, work, address, workers)
        run_there = ray.remote(_run_there).options(max_retries=0, **resources)

        def start(place: int) -> Member:
            reference = run_there.remote(os.getcwd(), pickle.dumps(Worker(work, place / size)))
            return _member(ray, reference, f"Ray's task {place + 1}")

        keep_at_work(work, size, start, progress)


@contextmanager
def _connected(ray: Any, address: str) -> Iterator[None]:
    try:
        ray.init(address=address, log_to_driver=True, logging_level="WARNING")
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"no Ray cluster at {address}: {reason}; start one with `ray start --head`") from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_nodes(ray: Any, nodes: list[dict[str, Any]], work: Work) -> None:
    """Check on every machine that it sees the models and the folder, and would measure the same cells.

    Raises:
        UsageError: some do not; each is named.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    beacon = work.folder / f"{secrets.token_hex(8)}.beacon"
    beacon.touch()
    places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    try:
        check = ray.remote(_fault_there)
        sent = (os.getcwd(), pickle.dumps(work), str(beacon))
        asked = [check.options(num_cpus=0, scheduling_strategy=place).remote(*sent) for place in places]
        wrong = [fault for fault in ray.get(asked) if fault]
    finally:
        beacon.unlink(missing_ok=True)
    if wrong:
        raise UsageError("; ".join(dict.fromkeys(wrong)))


def _share_out(
    ray: Any, nodes: list[dict[str, Any]], work: Work, address: str, workers: int | None
) -> tuple[int, dict[str, float]]:
    """Choose the number of workers and the resources that Ray reserves for each.

    Raises:
        UsageError: the cluster has too little for one worker.
    """
    if work.jobs[0].subject.device.startswith("cuda"):
        gpus = int(ray.cluster_resources().get("GPU", 0))
        if gpus < 1:
            raise UsageError(f"the Ray cluster at {address} has no GPU; use {spelled('device', 'cpu')}")
        return workers or gpus, {"num_gpus": 1, "num_cpus": 1}
    processors = [node["Resources"].get("CPU", 0.0) for node in nodes]
    if max(processors, default=0) < 1:
        raise UsageError(f"the Ray cluster at {address} has no processors to compute on")
    size = workers or sum(count > 0 for count in processors)
    return size, {"num_cpus": max(1, min(int(sum(processors) / size), int(max(processors))))}


def _member(ray: Any, reference: Any, name: str) -> Member:
    """Wrap a worker that Ray runs."""

    def end() -> End | None:
        done, _ = ray.wait([reference], timeout=0)
        if not done:
            return None
        try:
            ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            return "failed"
        except ray.exceptions.RayError:
            return "died"
        return "left"

    def stop() -> None:
        ray.cancel(reference)
        ray.wait([reference], timeout=_TIME_TO_STOP)

    return Member(name, end, stop)


def _opened(folder: str, content: bytes) -> Any:
    """Unpickle data sent from another machine, whose relative paths start at the folder.

    Raises:
        DiffQuantError: this machine does not see the folder, or a model.
    """
    try:
        os.chdir(folder)
    except OSError as error:
        raise DiffQuantError(f"it does not see {folder}") from error
    return pickle.loads(content)


def _run_there(folder: str, worker: bytes) -> None:
    _opened(folder, worker).run()


def _fault_there(folder: str, work: bytes, beacon: str) -> str | None:
    """The reason why a machine cannot take part, or None if it can."""
    from diffquant.sweep.addresses import check_alike

    host = Claimant.here().host
    try:
        sent = _opened(folder, work)
        if not Path(beacon).is_file():
            return f"{host} does not see {sent.folder}; the folder has to be on storage that all machines share"
        check_alike(sent)
    except (DiffQuantError, OSError) as error:
        return f"{host} cannot take part: {error}; models have to be on storage that all machines share"
    return None
