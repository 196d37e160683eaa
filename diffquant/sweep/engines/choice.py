"""The engine that options ask for."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from diffquant.errors import UsageError
from diffquant.support.devices import check_device
from diffquant.support.spelling import spelled
from diffquant.sweep.engines import Engine
from diffquant.sweep.engines.local import LocalEngine
from diffquant.sweep.engines.ray_cluster import RayEngine
from diffquant.sweep.grid import SweepOptions


def chosen_engine(
    options: SweepOptions,
    workers: int | None,
    devices: Sequence[str],
    ray: str | None,
    say: Callable[[str], None],
) -> tuple[SweepOptions, Engine]:
    """The engine, and the options with the device that it computes on.

    Args:
        workers: number of processes; None for one per device, or one.
        devices: devices, a process each; none where `options.device` is the only one.
        ray: address of a Ray cluster; None for this machine.
        say: function that is told in a line how threads and memory are shared out.

    Raises:
        UsageError: options that exclude each other, or a device that is not there.
        MissingDependencyError: Ray is not installed.
    """
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
        return options, RayEngine(ray, workers)
    if not devices:
        return options, LocalEngine(1 if workers is None else workers, say=say)
    if options.device != "auto":
        raise UsageError(f"{spelled('devices')} takes the place of {spelled('device')}; give one or the other")
    for device in devices:
        check_device(device)
    kinds = {device.partition(":")[0] for device in devices}
    if len(kinds) > 1:
        raise UsageError(
            f"{spelled('devices', ','.join(devices))} are not of one kind, and results of another kind are other cells"
        )
    return replace(options, device=kinds.pop()), LocalEngine(len(devices) if workers is None else workers, devices, say)
