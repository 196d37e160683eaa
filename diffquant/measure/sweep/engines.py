"""Engines: where a sweep's cells are measured. To add one, write its function and choose it in `choose_engine`.

There are this process, processes on this machine (workers.py) and actors of a Ray cluster (ray_cluster.py). An engine
whose workers are elsewhere starts each as a `RemoteWorker` and gives it cells with `share`, both of workers.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from diffquant.errors import UsageError
from diffquant.measure.sweep.cell import Run
from diffquant.measure.sweep.grid import SweepOptions
from diffquant.measure.sweep.workers import run_processes
from diffquant.support.names import option_name
from diffquant.support.progress import Progress

Engine = Callable[[Run, Progress], None]
"""A function that measures every cell of a run, and records those that fail.

Raises:
    UsageError: something that the engine needs is missing; raised before the first cell.
    DiffQuantError: the folder of the cells is gone, or workers end before they measure anything.
"""


def choose_engine(
    options: SweepOptions, workers: int | None, devices: Sequence[str], ray: str | None, log: Callable[[str], None]
) -> tuple[SweepOptions, Engine]:
    """Choose what measures a sweep's cells: this process, several processes, or a Ray cluster.

    Args:
        workers: number of processes; by default one per device.
        devices: devices to use; if there are several, each gets a process.
        ray: address of a Ray cluster, or None to run on this machine.
        log: called with a line on how threads and memory are divided among processes.

    Returns:
        The options with their `device` set, and the engine to pass to `run_sweep`.

    Raises:
        UsageError: options exclude each other, or a device does not exist.
        MissingDependencyError: Ray is not installed.
    """
    if workers is not None and workers < 1:
        raise UsageError(f"the number of workers must be 1 or more, got {workers}")
    several = len(devices) > 1
    if options.device_map is not None and (workers not in (None, 1) or several or ray):
        raise UsageError(
            f"{option_name('device_map')} spreads each model over all devices: leave out {option_name('workers')} and "
            f"{option_name('ray')}, and give one device"
        )
    if devices and not several:
        options = replace(options, device=devices[0])
    if ray is not None:
        from diffquant.measure.sweep.ray_cluster import require_ray, run_on_ray

        if several:
            raise UsageError(
                f"{option_name('device', ','.join(devices))} selects devices of this machine, but "
                f"{option_name('ray')} uses GPUs of the cluster; leave out one of them"
            )
        require_ray()
        return options, partial(run_on_ray, address=ray, workers=workers)
    if not several:
        return options, partial(run_processes, workers=workers or 1, say=log)
    from diffquant.support.devices import check_device  # which imports torch

    for device in devices:
        check_device(device)
    kinds = {device.partition(":")[0] for device in devices}
    if len(kinds) > 1:
        raise UsageError(
            f"{option_name('device', ','.join(devices))} are of different kinds, whose results differ; give "
            "devices of one kind"
        )
    processes = partial(run_processes, workers=workers or len(devices), devices=devices, say=log)
    return replace(options, device=kinds.pop()), processes
