"""What an adapter is, how one is registered, and the checks all of them share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from diffquant.errors import CheckpointError
from diffquant.family.heads import PROJECTIONS, HeadLayout
from diffquant.family.spec import DiffSpec
from diffquant.model.config import DiffTransformerConfig
from diffquant.model.layout import Shape, linear_shapes, parameter_shapes

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_COPIED = (
    *SIZES,
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
)


@dataclass(frozen=True)
class Adapter:
    """A source format's view of one model.

    Attributes:
        config: the model as DiffTransformer runs it.
        renames: parts of a canonical name that the source spells otherwise, canonical to source.
        source_rows: row of the source that each row of a parameter is, by a part of its canonical name, for those
            that are reordered or repeated on load. Every row of the source is used.
    """

    config: DiffTransformerConfig
    renames: Mapping[str, str] = field(default_factory=dict)
    source_rows: Mapping[str, Tensor] = field(default_factory=dict)

    def source_name(self, canonical: str) -> str:
        """The checkpoint's name for a DiffTransformer parameter."""
        for ours, theirs in self.renames.items():
            canonical = canonical.replace(ours, theirs)
        return canonical

    def source_shapes(self) -> dict[str, Shape]:
        """Every tensor the checkpoint must hold, by its own name."""
        return {
            self.source_name(name): self._source_shape(name, s) for name, s in parameter_shapes(self.config).items()
        }

    def source_linears(self) -> dict[str, Shape]:
        """The linear layers' weights [out, in], by the checkpoint's own names."""
        return {self.source_name(name): self._source_shape(name, s) for name, s in linear_shapes(self.config).items()}

    def row_order(self, canonical: str) -> Tensor | None:
        """Source row of each row of a DiffTransformer parameter; None where they are the same."""
        return next((rows for part, rows in self.source_rows.items() if part in canonical), None)

    def rows_as(self, layout: HeadLayout, canonical: str) -> Tensor | None:
        """Source row of each row of a parameter whose heads are laid out as `layout` has them; None for the same."""
        repeated = self.row_order(canonical)
        projection = next((each for each in PROJECTIONS if f".{each}." in canonical), None)
        order = None if projection is None else self.config.diff_spec.layout.order_as(layout, projection)
        if order is None or repeated is None:
            return repeated if order is None else order
        return repeated[order]

    def _source_shape(self, canonical: str, shape: Shape) -> Shape:
        rows = self.row_order(canonical)
        return shape if rows is None else (int(rows.max()) + 1, *shape[1:])


# From a config.json to its adapter.
Reader = Callable[[dict[str, Any]], Adapter]
READERS: dict[str, Reader] = {}


def register(model_type: str) -> Callable[[Reader], Reader]:
    """Make a function the reader of the config.json files of a `model_type`.

    Raises:
        ValueError: another function reads that type.
    """

    def keep(reader: Reader) -> Reader:
        if model_type in READERS:
            raise ValueError(f"model_type {model_type!r} has a reader already")
        READERS[model_type] = reader
        return reader

    return keep


def read_sizes(config: dict[str, Any], library_config: Callable[..., PreTrainedConfig]) -> dict[str, Any]:
    """Sizes and RoPE settings of a config.json, its library's defaults filled in.

    Raises:
        CheckpointError: a size is missing, or the library refuses the settings.
    """
    missing = [key for key in SIZES if not isinstance(config.get(key), int) or config[key] < 1]
    if missing:
        raise CheckpointError(f"config.json lacks a positive {', '.join(missing)}")
    try:
        full = library_config(**{key: value for key, value in config.items() if key != "quantization_config"})
    except (TypeError, ValueError, KeyError, StrictDataclassError) as error:
        raise CheckpointError(
            f"config.json is not a valid {config.get('model_type')} configuration: {error}"
        ) from error
    rope_type = full.rope_parameters["rope_type"]
    if rope_type not in ("default", *ROPE_INIT_FUNCTIONS):
        raise CheckpointError(f"config.json: rope_type {rope_type!r} is not one of {', '.join(ROPE_INIT_FUNCTIONS)}")
    sizes = {key: getattr(full, key) for key in _COPIED if hasattr(full, key)}
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    sizes["num_key_value_heads"] = kv_heads or heads
    sizes["head_dim"] = sizes["head_dim"] or sizes["hidden_size"] // heads
    return sizes | {"rope_parameters": dict(full.rope_parameters)}


def paired(heads: int, what: str) -> int:
    """Half of an even number of heads.

    Raises:
        CheckpointError: the number is odd.
    """
    if heads % 2:
        raise CheckpointError(f"{what} is {heads}: differential attention pairs its heads and needs an even number")
    return heads // 2


def build_config(sizes: dict[str, Any], spec: DiffSpec) -> DiffTransformerConfig:
    return DiffTransformerConfig(**sizes, spec=spec.to_dict())
