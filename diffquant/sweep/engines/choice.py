"""Chooses the engine from the options."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from diffquant.errors import UsageError
from diffquant.support.devices import check_device
from diffquant.support.spelling import spelled
from diffquant.sweep.engines import Engine
from diffquant.sweep.engines.local import run_processes
from diffquant.sweep.engines.ray_cluster import require_ray, run_on_ray
from diffquant.sweep.grid import SweepOptions


def chosen_engine(
    options: SweepOptions,
    workers: int | None,
    devices: Sequence[str],
    ray: str | None,
    say: Callable[[str], None],
) -> tuple[SweepOptions, Engine | None]:
    """Choose an engine, or None to run in this process, and set the device in the options.

    Args:
        workers: number of processes; by default one per device.
        devices: devices to use, one process each; empty to use `options.device` alone.
        ray: address of a Ray cluster, or None to run on this machine.
        say: called with a line on how threads and memory are shared out.

    Raises:
        UsageError: options that exclude each other, or a device that is not there.
        MissingDependencyError: Ray is not installed.
    """
    if workers is not None and workers < 1:
        raise UsageError(f"the number of workers must be 1 or more, got {workers}")
    if options.device_map is not None and (workers not in (None, 1) or devices or ray):
        raise UsageError(
            f"{spelled('device_map')} spreads each model over all devices: leave out {spelled('workers')}, "
            f"{spelled('devices')} and {spelled('ray')}"
        )
    if ray is not None:
        if devices:
            raise UsageError(
                f"{spelled('devices')} are this machine's, and {spelled('ray')} gives each of its workers a GPU: "
                "leave one of them out"
            )
        require_ray()
        return options, partial(run_on_ray, address=ray, workers=workers)
    if not devices:
        return options, partial(run_processes, workers=workers, say=say) if workers and workers > 1 else None
    if options.device != "auto":
        raise UsageError(f"{spelled('devices')} takes the place of {spelled('device')}; give one or the other")
    for device in devices:
        check_device(device)
    kinds = {device.partition(":")[0] for device in devices}
    if len(kinds) > 1:
        raise UsageError(
            f"{spelled('devices', ','.join(devices))} are not of one kind, and results of another kind are other cells"
        )
    processes = partial(run_processes, workers=workers or len(devices), devices=devices, say=say)
    return replace(options, device=kinds.pop()), processes
