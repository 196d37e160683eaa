"""Makes transformers' auto classes open every folder that diffquant writes, once `diffquant` is imported.

Importing `diffquant` imports neither torch nor transformers. diffquant's model types are registered as soon as
transformers' registries are imported, or immediately if they are imported already.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from diffquant.errors import UsageError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from diffquant.checkpoints.places import DeviceMap
    from diffquant.model.causal import CausalModel

# Arguments of transformers' `from_pretrained` that have no effect here, or that the auto class has resolved already.
_WITHOUT_EFFECT = {
    "_from_auto", "adapter_kwargs", "local_files_only", "low_cpu_mem_usage", "trust_remote_code", "use_safetensors",
}  # fmt: skip
# Settings in a configuration that do not concern the checkpoint, but later calls of the model.
_OF_CALLS = {"output_hidden_states", "return_dict", "use_cache"}


def register_with_transformers() -> None:
    """Register diffquant's model types with transformers' auto classes, now or when these are imported."""
    for module, register in _REGISTRATIONS.items():
        if module in sys.modules:
            register()
    sys.meta_path.insert(0, _RegistriesFinder())


class _RegistriesFinder(MetaPathFinder):
    """Import hook that registers diffquant's model types after transformers' registry modules are executed.

    The library `wrapt` could do this, but doubles the time that importing diffquant takes.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _REGISTRATIONS:
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _REGISTRATIONS[fullname]()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]  # of this import alone
        return spec


def _register_configs() -> None:
    from transformers.models.auto.configuration_auto import AutoConfig

    for config_class in _config_classes():
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)


def _register_models() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    for config_class in _config_classes():
        AutoModelForCausalLM.register(CONFIG_MAPPING[config_class.model_type], AutoModelLoader, exist_ok=True)


_REGISTRATIONS: dict[str, Callable[[], None]] = {
    "transformers.models.auto.configuration_auto": _register_configs,
    "transformers.models.auto.modeling_auto": _register_models,
}


def _config_classes() -> "list[type[PreTrainedConfig]]":
    """Return a configuration class for each model_type that an adapter reads and transformers does not implement."""
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    from diffquant.model.adapters import READERS
    from diffquant.model.config import DiffTransformerConfig
    from diffquant.model.sambay.config import SambaYConfig

    own = {config.model_type: config for config in (DiffTransformerConfig, SambaYConfig)}
    # Motif's config.json has model_type "Motif" or "motif".
    model_types = [name for reader in READERS for name in dict.fromkeys((reader, reader.capitalize()))]
    return [
        own.get(name) or type(f"{name}Config", (PreTrainedConfig,), {"model_type": name})
        for name in model_types
        if name not in CONFIG_MAPPING_NAMES
    ]


class AutoModelLoader:
    """Loader that `AutoModelForCausalLM` uses for diffquant's model types; `from_pretrained` calls `diffquant.load`."""

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        *_: object,
        config: "PreTrainedConfig",
        dtype: Any = None,
        torch_dtype: Any = None,
        device_map: "DeviceMap | torch.device | int | None" = None,
        max_memory: Mapping[int | str, int | str] | None = None,
        revision: str | None = None,
        **options: object,
    ) -> "CausalModel":
        """Return the model of a folder, with its recipe applied.

        Args:
            path: folder or name on the hub.
            config: configuration that the auto class has read or been given; its `attn_implementation`, if any, is
                passed to `set_attn_implementation`.
            dtype, torch_dtype: dtype or its name; the checkpoint's by default.
            device_map: one device for the whole model (the CPU by default), or a device map for `diffquant.load`.
            max_memory: maximum bytes per device, as in `diffquant.load`.
            revision: revision of a model on the hub.
            options: other arguments of transformers' `from_pretrained`, of which a few are ignored, such as
                `low_cpu_mem_usage`.

        Raises:
            UsageError: any other argument in `options` is set, or a setting in `config` is not the folder's.
            DiffQuantError: see `diffquant.load`.
        """
        from diffquant.checkpoints.source import open_source
        from diffquant.quantization.loading import load
        from diffquant.support.devices import resolve_dtype

        given = config.to_dict() | {name: options.pop(name) for name in options.keys() & _OF_CALLS}
        _refuse(path, config, (name for name, value in options.items() if value and name not in _WITHOUT_EFFECT))
        wanted = dtype or torch_dtype
        wanted = None if wanted == "auto" else resolve_dtype(wanted) if isinstance(wanted, str) else wanted
        source = open_source(f"{path}@{revision}" if revision and not Path(path).exists() else path)
        stored = type(config).from_dict(deepcopy(source.checkpoint.config)).to_dict()
        changed = {name for name, value in given.items() if stored.get(name) != value}
        _refuse(path, config, changed - {"_name_or_path", *_OF_CALLS, *(["dtype"] if wanted else [])})
        device, spread = _parse_device_map(device_map)
        model = load(source, None, wanted, device, device_map=spread, max_memory=max_memory)
        for name in given.keys() & _OF_CALLS:
            setattr(model.config, name, given[name])
        if config._attn_implementation is not None:
            model.set_attn_implementation(config._attn_implementation)
        # Models that transformers loads are trainable; low-bit weights are not.
        model.requires_grad_(not model.has_low_bit_weights)
        return model

    @classmethod
    def _from_config(cls, config: "PreTrainedConfig", dtype: Any = None, **_: object) -> "CausalModel":
        """Return a model with freshly initialized parameters, in float32 or another dtype."""
        from diffquant.model.adapters import adapter_for

        # A configuration has None for what config.json leaves out.
        stated = {name: value for name, value in config.to_dict().items() if value is not None}
        model: CausalModel = adapter_for(stated).architecture.new_model().to(dtype)
        return model


def _refuse(path: str, config: "PreTrainedConfig", asked: Iterable[str]) -> None:
    if names := ", ".join(sorted(asked)):
        raise UsageError(
            f"{path} is a {config.model_type} model, which diffquant loads: it supports transformers' arguments "
            f"dtype, device_map and max_memory; leave out {names}"
        )


def _parse_device_map(device_map: "DeviceMap | torch.device | int | None") -> "tuple[str, DeviceMap | None]":
    """Split a `device_map` into one device for the whole model and, if it names several devices, the map itself."""
    if isinstance(device_map, Mapping) and set(device_map) == {""}:
        device_map = device_map[""]
    if device_map is None or isinstance(device_map, int):
        return "cpu" if device_map is None else f"cuda:{device_map}", None
    if not isinstance(device_map, str | Mapping):
        device_map = str(device_map)
    is_device = isinstance(device_map, str) and device_map.partition(":")[0] in ("cpu", "cuda", "mps", "xpu")
    return (str(device_map), None) if is_device else ("auto", device_map)
