"""The engine of a Ray cluster: workers are Ray's tasks. Ray is imported when an engine is made."""

import os
import pickle
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffquant.errors import DiffQuantError, MissingDependencyError, UsageError
from diffquant.support.progress import Progress
from diffquant.support.spelling import spelled
from diffquant.sweep.claims import Claimant
from diffquant.sweep.crew import Crew, End
from diffquant.sweep.orders import Order
from diffquant.sweep.work import Work

# Seconds that a worker has to let go of its claim.
_TIME_TO_STOP = 10.0


class RayEngine:
    """An engine that runs workers on a Ray cluster, whose machines all see the models and the sweep's folder.

    Attributes:
        address: address of the cluster as `ray.init` takes it; "auto" finds the one that runs here.
        workers: number of workers; None for one per GPU, or per machine where processors compute.
    """

    def __init__(self, address: str, workers: int | None = None) -> None:
        """Find Ray.

        Raises:
            MissingDependencyError: it is not installed.
            UsageError: no worker is asked for.
        """
        try:
            import ray
        except ImportError as error:
            raise MissingDependencyError(f"{spelled('ray')} needs Ray: pip install 'diffquant[ray]'") from error
        if workers is not None and workers < 1:
            raise UsageError(f"the number of workers must be 1 or more, got {workers}")
        self._ray: Any = ray
        self.address, self.workers = address, workers

    def run(self, work: Work, progress: Progress) -> None:
        with self._connected():
            nodes = [node for node in self._ray.nodes() if node["Alive"]]
            self._check_nodes(work, nodes)
            size, resources = self._share_out(work, nodes)
            carry_out = self._ray.remote(_carry_out).options(max_retries=0, **resources)

            def start(place: int) -> _Task:
                return _Task(self._ray, carry_out.remote(_packed(Order(work, place / size))), place)

            Crew(work, size, start).run(progress)

    @contextmanager
    def _connected(self) -> Iterator[None]:
        try:
            self._ray.init(address=self.address, log_to_driver=True, logging_level="WARNING")
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise UsageError(
                f"no Ray cluster at {self.address}: {reason}; start one with `ray start --head`"
            ) from error
        try:
            yield
        finally:
            self._ray.shutdown()

    def _check_nodes(self, work: Work, nodes: list[dict[str, Any]]) -> None:
        """Check on every machine that it sees the models and the folder, and would measure the same cells.

        Raises:
            UsageError: some do not; each is named.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        beacon = work.folder / f"{secrets.token_hex(8)}.beacon"
        beacon.touch()
        try:
            content = _packed(work)
            check = self._ray.remote(_fault_here)
            faults = self._ray.get(
                [
                    check.options(
                        num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                    ).remote(content, str(beacon))
                    for node in nodes
                ]
            )
        finally:
            beacon.unlink(missing_ok=True)
        if wrong := [fault for fault in faults if fault]:
            raise UsageError("; ".join(dict.fromkeys(wrong)))

    def _share_out(self, work: Work, nodes: list[dict[str, Any]]) -> tuple[int, dict[str, float]]:
        """The number of workers, and what Ray keeps for each.

        Raises:
            UsageError: the cluster has not enough for one.
        """
        resources: dict[str, float] = self._ray.cluster_resources()
        if work.batches[0].subject.device.startswith("cuda"):
            size = int(resources.get("GPU", 0)) if self.workers is None else self.workers
            if size < 1 or resources.get("GPU", 0) < 1:
                raise UsageError(f"the Ray cluster at {self.address} has no GPU; use {spelled('device', 'cpu')}")
            return size, {"num_gpus": 1, "num_cpus": 1}
        processors = [node["Resources"].get("CPU", 0.0) for node in nodes]
        size = sum(count > 0 for count in processors) if self.workers is None else self.workers
        if max(processors, default=0) < 1:
            raise UsageError(f"the Ray cluster at {self.address} has no processors to compute on")
        return size, {"num_cpus": max(1, min(int(sum(processors) / size), int(max(processors))))}


@dataclass(frozen=True)
class _Packed:
    """Something that travels to another machine, with the folder that relative paths start from."""

    folder: str
    content: bytes

    def open(self) -> Any:
        """What was packed.

        Raises:
            DiffQuantError: this machine does not see the folder, or a model.
        """
        try:
            os.chdir(self.folder)
        except OSError as error:
            raise DiffQuantError(f"it does not see {self.folder}") from error
        return pickle.loads(self.content)


class _Task:
    """A worker that Ray runs."""

    def __init__(self, ray: Any, reference: Any, place: int) -> None:
        self._ray, self._reference = ray, reference
        self.name = f"Ray's task {place + 1}"

    def end(self) -> End | None:
        done, _ = self._ray.wait([self._reference], timeout=0)
        if not done:
            return None
        try:
            self._ray.get(self._reference)
        except self._ray.exceptions.RayTaskError as error:
            print(f"{self.name}: {error}", flush=True)
            return "failed"
        except self._ray.exceptions.RayError:
            return "died"
        return "left"

    def stop(self) -> None:
        self._ray.cancel(self._reference)
        self._ray.wait([self._reference], timeout=_TIME_TO_STOP)


def _packed(content: Work | Order) -> _Packed:
    return _Packed(os.getcwd(), pickle.dumps(content))


def _carry_out(packed: _Packed) -> None:
    packed.open().carry_out()


def _fault_here(packed: _Packed, beacon: str) -> str | None:
    """What keeps this machine from taking part; None where nothing does."""
    from diffquant.sweep.addresses import check_alike

    host = Claimant.here().host
    try:
        work = packed.open()
        if not Path(beacon).is_file():
            return f"{host} does not see {work.folder}; the folder has to be on storage that all machines share"
        check_alike(work)
    except (DiffQuantError, OSError) as error:
        return f"{host} cannot take part: {error}; models have to be on storage that all machines share"
    return None
