"""Where a model's parameters lie: on one device, or spread over devices, main memory and disk by accelerate."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from diffquant.errors import UsageError
from diffquant.model.causal import CausalModel

# "auto", or the place of each module by its name: a device, "cpu" or "disk".
DeviceMap = str | Mapping[str, str | int]

_EMBEDDING = "model.embed_tokens"


class Placement(Protocol):
    """A way to place a model."""

    def put(self, name: str, data: Tensor) -> Tensor:
        """A parameter's data in its place; on the meta device where the place is the disk."""

    def finish(self, model: CausalModel) -> None:
        """Make a model run whose parameters were put in their places."""


class OneDevice:
    """All of a model on one device."""

    def __init__(self, device: str) -> None:
        self.device = device

    def put(self, _name: str, data: Tensor) -> Tensor:
        return data.to(self.device)

    def finish(self, model: CausalModel) -> None:
        model.to(self.device)


class Spread:
    """A model over several places. What lies in memory or on disk comes to the device that computes when it is needed.

    Source: accelerate's big-model inference.
    """

    def __init__(
        self,
        model: CausalModel,
        device_map: DeviceMap,
        dtype: torch.dtype,
        max_memory: Mapping[int | str, int | str] | None = None,
        offload_folder: Path | None = None,
    ) -> None:
        """Decide on the places, before any parameter is read.

        Args:
            model: the model without storage.
            device_map: "auto", or places by modules' names.
            dtype: dtype of the model, from which the sizes of its layers follow.
            max_memory: most bytes of each place for "auto", such as {0: "20GB", "cpu": "60GB"}; all of it by default.
            offload_folder: folder for what lies on disk.

        Raises:
            UsageError: parameters have no place, the embedding would have to be fetched, or a folder is missing.
        """
        # Here, since it takes a second that models on one device need not spend.
        from accelerate import infer_auto_device_map
        from accelerate.utils import get_balanced_memory

        self._layer_classes = list(model._no_split_modules or ())
        if device_map == "auto":
            sizes: dict[str, Any] = {"no_split_module_classes": self._layer_classes, "dtype": dtype}
            memory = get_balanced_memory(model, dict(max_memory) if max_memory else None, **sizes)
            device_map = infer_auto_device_map(model, memory, **sizes)
        if isinstance(device_map, str):
            raise UsageError(f"device_map is 'auto' or a mapping from modules to devices, got {device_map!r}")
        self.places = dict(device_map)
        self._folder = offload_folder
        self._index: dict[str, Any] = {}
        self._check(model)

    def put(self, name: str, data: Tensor) -> Tensor:
        place = self._place_of(name)
        if place is not None and place != "disk":
            return data.to(torch.device(place))
        from accelerate.utils import offload_weight

        offload_weight(data, name, self._folder, self._index)
        return data.to("meta")

    def finish(self, model: CausalModel) -> None:
        from accelerate import dispatch_model
        from accelerate.utils import save_offload_index

        if self._index:
            save_offload_index(self._index, self._folder)
        # A layer's weights come all at once: attention reads some of them without calling their modules.
        dispatch_model(
            model, self.places, offload_dir=self._folder, preload_module_classes=self._layer_classes, force_hooks=True
        )

    def _place_of(self, name: str) -> str | int | None:
        parts = name.split(".")
        prefixes = (".".join(parts[:count]) for count in range(len(parts), -1, -1))
        return next((self.places[prefix] for prefix in prefixes if prefix in self.places), None)

    def _check(self, model: CausalModel) -> None:
        homeless = [name for name, _ in model.named_parameters() if self._place_of(name) is None]
        if homeless:
            raise UsageError(
                f"device_map has no place for {len(homeless)} parameters, {homeless[0]} among them; name their "
                "modules, or the whole model as ''"
            )
        has_device = bool(set(self.places.values()) - {"cpu", "disk"})
        if self._place_of(f"{_EMBEDDING}.weight") in (("cpu", "disk") if has_device else ("disk",)):
            raise UsageError(
                f"device_map puts {_EMBEDDING} where nothing computes; put it on a device, or in 'cpu' where all the "
                "rest is in 'cpu' or on 'disk'"
            )
        if "disk" in self.places.values() and self._folder is None:
            raise UsageError("device_map puts parts of the model on disk: give offload_folder, the folder for them")
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
