"""A Ray cluster on this machine, for as long as it is needed, beside any other that runs here."""

import os
import sys
from contextlib import suppress
from typing import Any

# On a machine that is busy a cluster's start takes longer than Ray waits for it.
_TRIES = 3


class RayHere:
    """A cluster of one machine, this one.

    Attributes:
        processors: number of processors that Ray shares out, whatever there are.
    """

    def __init__(self, processors: int) -> None:
        self.processors = processors
        # Workers find what this process has found.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.getcwd(), *sys.path)))
        self._cluster = self._started()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    @property
    def head(self) -> list[int]:
        """The processes without which the cluster is gone."""
        processes = self._cluster.head_node.all_processes
        return [info.process.pid for kind in ("raylet", "gcs_server") for info in processes.get(kind, [])]

    def start_again(self) -> None:
        """Start a cluster in place of one whose head is gone."""
        self.stop()
        self._cluster = self._started()

    def stop(self) -> None:
        """End all of the cluster's processes."""
        self._cluster.shutdown()

    def _started(self) -> Any:
        from ray.cluster_utils import Cluster

        arguments = {"num_cpus": self.processors, "include_dashboard": False}
        for _ in range(_TRIES - 1):
            with suppress(Exception):  # Ray has no class of its own for it.
                return Cluster(initialize_head=True, head_node_args=arguments)
        return Cluster(initialize_head=True, head_node_args=arguments)
