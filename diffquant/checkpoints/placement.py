"""Places a model's parameters: on one device, or spread by accelerate over devices, main memory and disk."""

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diffquant.checkpoints.places import OffloadPlan
from diffquant.errors import UsageError
from diffquant.model.causal import CausalModel
from diffquant.support.names import first_few, option_name

_EMBEDDING, _LAYERS = "model.embed_tokens", "model.layers."
EMBEDDING = f"{_EMBEDDING}.weight"
_ENDS = (EMBEDDING, "lm_head.weight")
# Attribute of a layer with the functions that read its parameters, by name.
_READERS = "_parameter_readers"


class Placement:
    """Decides where each parameter of a model is stored; this base class stores all of them on one device."""

    def __init__(self, device: str) -> None:
        self.device = device

    def place_parameter(self, name: str, read: Callable[[], Tensor]) -> Tensor:  # noqa: ARG002
        """Read a parameter, store it in its place, and return it.

        The result is on the meta device if the parameter is not kept in memory.

        Args:
            name: the model's name for the parameter.
            read: function that reads the parameter.
        """
        return read().to(self.device)

    def finish(self, model: CausalModel) -> None:
        """Make a model runnable after its parameters were placed."""
        model.to(self.device)


class LayerwisePlacement(Placement):
    """Placement that reads a layer's parameters from the checkpoint when needed and drops them afterwards.

    The embedding also stays in the checkpoint, and only rows of given tokens are read. The head is not read at all.
    """

    def __init__(self, model: CausalModel, embed: Callable[[Tensor], Tensor]) -> None:
        """Set up for a model on the meta device; `embed` reads rows of the embedding by token ids [N]."""
        self._model, self._embed = model, embed
        self._readers: dict[str, Callable[[], Tensor]] = {}

    def place_parameter(self, name: str, read: Callable[[], Tensor]) -> Tensor:
        empty: Tensor = self._model.get_parameter(name)
        if name.startswith(_LAYERS):
            self._readers[name] = read
        elif name not in _ENDS:
            return read()
        return empty

    def finish(self, model: CausalModel) -> None:
        model.set_submodule(_EMBEDDING, _Rows(self._embed))
        for number, layer in enumerate(model.model.layers):
            prefix = f"{_LAYERS}{number}."
            own = {name.removeprefix(prefix): read for name, read in self._readers.items() if name.startswith(prefix)}
            layer.__dict__[_READERS] = own


class _Rows(nn.Module):
    """An embedding whose rows are read when needed."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._read = read
        # A model computes on the device of its first parameter.
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        known, places = ids.unique(return_inverse=True)
        return self._read(known)[places]


class SpreadPlacement(Placement):
    """Placement that spreads a model over devices, main memory and disk.

    Weights in main memory or on disk are moved to the computing device when they are needed.

    Source: accelerate's big-model inference.
    """

    def __init__(self, model: CausalModel, places: OffloadPlan, dtype: torch.dtype) -> None:
        """Choose the place of each module, before any parameter is read.

        Args:
            model: the model on the meta device.
            places: device map with its memory limits and folder.
            dtype: dtype of the model, from which the sizes of its layers follow.

        Raises:
            UsageError: modules are unknown, parameters have no place, the embedding is placed where nothing computes,
                or there is no folder for weights on disk.
        """
        # Imported here: it takes a second, which models on one device need not spend.
        from accelerate import infer_auto_device_map
        from accelerate.utils import get_balanced_memory

        self._layer_classes = list(model._no_split_modules or ())
        device_map = places.device_map
        if isinstance(device_map, str):
            sizes: dict[str, Any] = {"no_split_module_classes": self._layer_classes, "dtype": dtype}
            limits = dict(places.max_memory) if places.max_memory else None
            try:
                memory = get_balanced_memory(model, limits, **sizes)
            except ValueError as error:
                raise UsageError(f"cannot read max_memory {limits}: {error}") from error
            device_map = infer_auto_device_map(model, memory, **sizes)
        elif unknown := sorted(set(device_map) - {name for name, _ in model.named_modules()}):
            raise UsageError(f"device_map names modules that the model does not have: {first_few(unknown, ', ')}")
        self.places = _disjoint(model, device_map)
        self._index: dict[str, Any] = {}
        self._check(model)
        self._folder = self._new_folder(model, places.offload_folder) if "disk" in self.places.values() else None

    def place_parameter(self, name: str, read: Callable[[], Tensor]) -> Tensor:
        data, place = read(), self._place_of(name)
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
        # Move a layer's weights all at once: attention reads some of them without calling their modules.
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
                f"device_map has no place for {len(homeless)} parameters, such as {homeless[0]}; name their "
                "modules, or the whole model as ''"
            )
        has_device = bool(set(self.places.values()) - {"cpu", "disk"})
        if self._place_of(EMBEDDING) in (("cpu", "disk") if has_device else ("disk",)):
            raise UsageError(
                f"device_map puts {_EMBEDDING} on a place that does not compute; put it on a device, or on 'cpu' "
                "if everything else is on 'cpu' or 'disk'"
            )

    @staticmethod
    def _new_folder(model: CausalModel, parent: Path | None) -> Path:
        """Make a folder for this model alone, which is removed with the model."""
        if parent is None:
            raise UsageError(f"the device map places parts of the model on disk: give {option_name('offload_folder')}")
        try:
            parent.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix="model-", dir=parent.absolute()))
        except OSError as error:
            raise UsageError(f"cannot write to the offload folder {parent}: {error.strerror}") from error
        # A sweep's reference states hold the head, which then outlives its model.
        weakref.finalize(model.lm_head, shutil.rmtree, folder, ignore_errors=True)
        return folder


def _disjoint(
    module: nn.Module, places: Mapping[str, str | int], name: str = "", inherited: str | int | None = None
) -> dict[str, str | int]:
    """Return places by names of modules that do not contain each other, as accelerate requires; inner modules win."""
    place, prefix = places.get(name, inherited), f"{name}." if name else ""
    if not any(other != name and other.startswith(prefix) for other in places):
        return {} if place is None else {name: place}
    parts = (_disjoint(part, places, prefix + child, place) for child, part in module.named_children())
    return {inner: place for part in parts for inner, place in part.items()}


@contextmanager
def move_to_compute_device(module: nn.Module) -> Iterator[None]:
    """Move a module's parameters to the computing device inside this context, wherever they are stored outside it.

    Args:
        module: a decoder layer, with all of its submodules, or a module that has parameters itself.
    """
    if readers := module.__dict__.get(_READERS):
        module.load_state_dict({name: read() for name, read in readers.items()}, assign=True)
        module.requires_grad_(False)
        yield
        module.to("meta")
        return
    if not hasattr(module, "_hf_hook"):
        yield
        return
    from accelerate.utils import align_module_device

    with align_module_device(module):
        yield
