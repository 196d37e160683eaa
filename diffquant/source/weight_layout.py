"""Finds weights stored as [in, out], while packing needs [out, in]: GPT-2's Conv1D, some experts.

No file says which. We infer it from biases, whose length is `out`, and from the shapes of related projections.
"""

from collections.abc import Mapping

from diffquant.formats.dequantized.base import CONV1D
from diffquant.formats.reader import TensorInfo

# These have more outputs than inputs in every model.
_WIDENING = ("c_attn", "c_fc")
_GATE_UP, _DOWN = "gate_up_proj", "down_proj"

Tensors = Mapping[str, TensorInfo]


def stored_transposed(tensors: Tensors) -> list[str]:
    """Names of the weights, of two or three axes, that are stored as [..., in, out]."""
    weights = [name for name, info in tensors.items() if len(info.shape) in (2, 3) and not name.endswith("bias")]
    found = [name for name in weights if _is_transposed(name, tensors)]
    if any(_module(name) in CONV1D for name in found):
        # A square matrix does not show its layout, so decide for all of its kind together.
        found += [name for name in weights if _module(name) in CONV1D and len(set(tensors[name].shape)) == 1]
    chosen = set(found)
    return [name for name in weights if name in chosen]


def _is_transposed(name: str, tensors: Tensors) -> bool:
    *_, rows, columns = tensors[name].shape
    if rows == columns:
        return False
    bias = tensors.get(f"{name.removesuffix('.weight')}.bias") or tensors.get(f"{name}_bias")
    if bias is not None and bias.shape:
        return bias.shape[-1] == columns
    if _module(name) in _WIDENING:
        return rows < columns
    return _is_transposed_expert(name, tensors)


def _is_transposed_expert(name: str, tensors: Tensors) -> bool:
    """Whether the shapes of an expert's two matrices fit only if both are [in, out]."""
    gate_up = tensors.get(name.replace(_DOWN, _GATE_UP))
    down = tensors.get(name.replace(_GATE_UP, _DOWN))
    if gate_up is None or down is None or gate_up is down or len(gate_up.shape) != 3 or len(down.shape) != 3:
        return False
    return gate_up.shape[2] == 2 * down.shape[1] and gate_up.shape[1] == down.shape[2]


def _module(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]
