"""From a checkpoint's own names and head layout to DiffTransformer's: one file a source format.

An adapter is pure: it translates a config.json and names, and never reads a tensor's data. Formats
differ in how heads are ordered inside a projection; that order goes into the `DiffSpec`, so tensors
(packed ones too) are loaded as they are. Only where KV heads must be repeated (unilm V1 with its
plain GQA pairing) does `Adapter.row_order` pick rows.
"""

from collections.abc import Callable
from typing import Any

from diffquant.errors import UnknownModelTypeError
from diffquant.model.adapters.base import Adapter
from diffquant.model.adapters.diffllama import read_diffllama
from diffquant.model.adapters.llama import read_llama
from diffquant.model.adapters.native import read_native
from diffquant.model.adapters.unilm import read_unilm_v1, read_unilm_v2

READERS: dict[str, Callable[[dict[str, Any]], Adapter]] = {
    "diffllama": read_diffllama,
    "diff_v1": read_unilm_v1,
    "diff_v2": read_unilm_v2,
    "diff_transformer": read_native,
    "llama": read_llama,
}


def adapter_for(config: dict[str, Any]) -> Adapter:
    """The adapter for a config.json.

    Raises:
        UnknownModelTypeError: no adapter reads its `model_type`.
        CheckpointError: a size is missing or contradicts another.
    """
    model_type = config.get("model_type")
    if model_type not in READERS:
        raise UnknownModelTypeError(
            f"model_type {model_type!r} is not read; supported are {', '.join(READERS)}. A unilm checkpoint needs "
            "a config.json with model_type diff_v1 or diff_v2 and Llama's keys for the sizes"
        )
    return READERS[model_type](config)


__all__ = ["READERS", "Adapter", "adapter_for"]
