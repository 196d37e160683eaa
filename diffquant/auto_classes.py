"""transformers' auto classes open every folder that diffquant writes, once `diffquant` is imported.

Importing `diffquant` imports neither torch nor transformers: our model types are registered at the end of the import of
transformers' own registries, or at once where they are there already.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffquant.errors import UsageError

if TYPE_CHECKING:
    from types import ModuleType

    from transformers import PreTrainedConfig

    from diffquant.model.causal import CausalModel
    from diffquant.source.places import DeviceMap

# Arguments of transformers' `from_pretrained` that change nothing of what is loaded here, or are resolved already.
_WITHOUT_EFFECT = {
    "adapter_kwargs",
    "local_files_only",
    "low_cpu_mem_usage",
    "trust_remote_code",
    "use_safetensors",
}


def register_with_transformers() -> None:
    """Register our model types with transformers' auto classes as soon as these are imported."""
    for module, register in _REGISTRATIONS.items():
        if module in sys.modules:
            register()
    sys.meta_path.insert(0, _RegistriesFinder())


class _RegistriesFinder(MetaPathFinder):
    """A finder of transformers' registries, which leaves finding to the others and adds what follows the import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: "ModuleType | None" = None
    ) -> ModuleSpec | None:
        register = _REGISTRATIONS.get(fullname)
        if register is None:
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: "ModuleType") -> None:
                execute(module)
                register()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _register_configs() -> None:
    from transformers.models.auto.configuration_auto import AutoConfig

    for config_class in _config_classes():
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)


def _register_models() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    for config_class in _config_classes():
        AutoModelForCausalLM.register(CONFIG_MAPPING[config_class.model_type], LoadedModel, exist_ok=True)


_REGISTRATIONS: dict[str, Callable[[], None]] = {
    "transformers.models.auto.configuration_auto": _register_configs,
    "transformers.models.auto.modeling_auto": _register_models,
}


def _config_classes() -> "list[type[PreTrainedConfig]]":
    """A configuration class for each model_type that an adapter reads and transformers has no model of."""
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    from diffquant.model.adapters import READERS
    from diffquant.model.config import DiffTransformerConfig
    from diffquant.model.sambay.config import SambaYConfig

    own = {config.model_type: config for config in (DiffTransformerConfig, SambaYConfig)}
    # Motif's files say "Motif" or "motif".
    model_types = [name for reader in READERS for name in dict.fromkeys((reader, reader.capitalize()))]
    return [
        own.get(name) or type(f"{name}Config", (PreTrainedConfig,), {"model_type": name})
        for name in model_types
        if name not in CONFIG_MAPPING_NAMES
    ]


class LoadedModel:
    """The class behind `AutoModelForCausalLM` for our model types: `diffquant.load` under transformers' names."""

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        *_: object,
        config: "PreTrainedConfig",
        dtype: Any = None,
        torch_dtype: Any = None,
        device_map: "DeviceMap | int | None" = None,
        max_memory: Mapping[int | str, int | str] | None = None,
        revision: str | None = None,
        **options: object,
    ) -> "CausalModel":
        """The model of a folder, with its recipe applied.

        Args:
            path: folder or name on the hub.
            config: configuration that the auto class has read, an `attn_implementation` with it, which
                `set_attn_implementation` takes.
            dtype, torch_dtype: dtype or its name; the checkpoint's by default.
            device_map: device of all of the model, the processor by default, or a map as `diffquant.load` takes it.
            max_memory: most bytes of each place, as `diffquant.load` takes it.
            revision: revision of a model on the hub.
            options: other arguments of transformers' `from_pretrained`.

        Raises:
            UsageError: an argument asks for what `diffquant.load` does not do.
            DiffQuantError: as `diffquant.load` raises it.
        """
        from diffquant.loading import load
        from diffquant.support.devices import resolve_dtype

        asked = sorted(name for name, value in options.items() if value and name not in _WITHOUT_EFFECT)
        if asked:
            raise UsageError(
                f"{path} is a {config.model_type} model, which diffquant loads: of transformers' arguments it takes "
                f"dtype, device_map and max_memory, not {', '.join(asked)}"
            )
        wanted = dtype or torch_dtype
        wanted = None if wanted == "auto" else resolve_dtype(wanted) if isinstance(wanted, str) else wanted
        place = f"{path}@{revision}" if revision and not Path(path).exists() else path
        device, spread = _place(device_map)
        model = load(place, None, wanted, device, device_map=spread, max_memory=max_memory)
        if config._attn_implementation is not None:
            model.set_attn_implementation(config._attn_implementation)
        # transformers' models can be trained on; low bits cannot.
        model.requires_grad_(not model.has_low_bit_weights)
        return model

    @classmethod
    def _from_config(cls, config: "PreTrainedConfig", **_: object) -> "CausalModel":
        """A model of a configuration, with parameters as they are before any training."""
        from diffquant.model.adapters import adapter_for

        model: CausalModel = adapter_for(config.to_dict()).architecture.new_model()
        return model


def _place(device_map: "DeviceMap | int | None") -> "tuple[str, DeviceMap | None]":
    """The device that a `device_map` gives to all of a model, and the map where it gives parts to several."""
    if isinstance(device_map, Mapping) and set(device_map) == {""}:
        device_map = device_map[""]
    if device_map is None or isinstance(device_map, int):
        return "cpu" if device_map is None else f"cuda:{device_map}", None
    is_device = isinstance(device_map, str) and device_map.partition(":")[0] in ("cpu", "cuda", "mps", "xpu")
    return (str(device_map), None) if is_device else ("auto", device_map)
