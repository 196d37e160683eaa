"""Places for a model that is larger than one device. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from diffquant.errors import UsageError
from diffquant.support.names import option_name

# "auto", or the place of each module by its name: a device, "cpu" or "disk".
DeviceMap = str | Mapping[str, str | int]


@dataclass(frozen=True)
class OffloadPlan:
    """The places that a model is spread over: devices, main memory and the disk.

    Attributes:
        device_map: "auto", or places by modules' names.
        max_memory: memory limit of each place for "auto", such as {0: "20GB", "cpu": "60GB"}; no limit by default.
        offload_folder: folder for weights on disk.
    """

    device_map: DeviceMap
    max_memory: Mapping[int | str, int | str] | None = None
    offload_folder: Path | None = None

    @classmethod
    def of(
        cls,
        device: str,
        device_map: DeviceMap | None,
        offload_folder: Path | str | None,
        max_memory: Mapping[int | str, int | str] | None = None,
    ) -> Self | None:
        """Make a plan from the arguments of `diffquant.load`, or return None if `device_map` is None.

        Raises:
            UsageError: `device_map` is combined with a device, is neither "auto" nor a mapping, or is missing although
                a folder or `max_memory` is given.
        """
        if device_map is None:
            if offload_folder is not None or max_memory is not None:
                what = "max_memory" if offload_folder is None else "an offload folder"
                raise UsageError(f"{what} needs a device map: give {option_name('device_map', 'auto')} too")
            return None
        if device_map != "auto" and not isinstance(device_map, Mapping):
            raise UsageError(f"device_map must be 'auto' or a mapping from modules to devices, got {device_map!r}")
        if device != "auto":
            raise UsageError(
                f"a device ({device!r}) and a device map exclude each other: leave out {option_name('device')} or "
                f"{option_name('device_map')}"
            )
        return cls(device_map, max_memory, None if offload_folder is None else Path(offload_folder))

    @property
    def device(self) -> str:
        """Name of the computing device, to which weights in memory or on disk are moved.

        "auto" if `device_map` is "auto".
        """
        if isinstance(self.device_map, str):
            return "auto"
        place = next((place for place in self.device_map.values() if place not in ("cpu", "disk")), "cpu")
        return f"cuda:{place}" if isinstance(place, int) else place
