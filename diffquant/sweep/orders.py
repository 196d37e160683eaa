"""Orders: what a process that was started as a worker is sent."""

from dataclasses import dataclass

from diffquant.support.progress import silent
from diffquant.sweep.work import Work
from diffquant.sweep.worker import Worker


@dataclass(frozen=True)
class Order:
    """A worker's part of a sweep, as plain data that can be sent.

    Attributes:
        start: share of the batches after which the worker begins.
        device: device that computes; None for the one that was planned.
    """

    work: Work
    start: float
    device: str | None = None

    def carry_out(self) -> None:
        """Measure cells until all are settled.

        Raises:
            DiffQuantError: the folder of the cells is gone.
        """
        Worker(self.work, silent, self.start, self.device).run(is_patient=True)
