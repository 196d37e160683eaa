"""A model that is loaded as the source of a verb: what `save_pretrained` would write, without the folder."""

from pathlib import Path
from typing import Any

from torch import Tensor

from diffquant.errors import UsageError
from diffquant.formats.reader import Checkpoint, TensorInfo
from diffquant.model.adapters import adapter_for
from diffquant.model.causal import CausalModel
from diffquant.recipe import Recipe
from diffquant.source.source import Source

_NAME = Path("model in memory")


class MemoryCheckpoint(Checkpoint):
    """The parameters of a loaded model, by its own names."""

    def __init__(self, model: CausalModel) -> None:
        self.path = _NAME
        state = model.state_dict()
        self._parameters: dict[str, Tensor] = {name: state[name] for name in model.model.architecture.parameters}
        self.tensors = {name: TensorInfo(x.dtype, tuple(x.shape), _NAME.name) for name, x in self._parameters.items()}
        self.config = _config_of(model)

    def read(self, name: str) -> Tensor:
        return self._parameters[name].detach().cpu()

    def read_rows(self, name: str, rows: slice | Tensor) -> Tensor:
        return self.read(name)[rows]

    def weight_files(self) -> list[Path]:
        return []

    def write_side_files(self, folder: Path) -> None:
        """Nothing: a model knows no tokenizer."""


def memory_source(model: CausalModel) -> Source:
    """The source that a loaded model is.

    Raises:
        UsageError: its weights are at low bits already, or some lie on the disk.
    """
    if model.has_low_bit_weights:
        raise UsageError("the weights of this model are at low bits already; load its 16-bit checkpoint")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UsageError(
            "parts of this model are spread to other places (device_map); quantize its checkpoint's folder"
        )
    checkpoint = MemoryCheckpoint(model)
    return Source(checkpoint, adapter_for(checkpoint.config).fitted_to(checkpoint.tensors), {}, {})


def _config_of(model: CausalModel) -> dict[str, Any]:
    """The contents of config.json, with the tokens that end a text."""
    settings = model.generation_config
    tokens = {f"{name}_token_id": getattr(settings, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    recipe = {} if model.recipe == Recipe() else {"diffquant_config": model.recipe.to_config()}
    config: dict[str, Any] = model.config.to_dict()
    return config | {"dtype": str(model.dtype).removeprefix("torch.")} | tokens | recipe
