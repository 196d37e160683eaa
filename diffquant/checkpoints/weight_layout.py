"""Finds weights stored as [in, out], while packing needs [out, in]: GPT-2's Conv1D, some experts.

No file states the layout. It is inferred from biases, whose length is `out`, and from shapes of related projections.
"""

import re
from collections.abc import Mapping, Sequence

from diffquant.checkpoints.dequantized import CONV1D
from diffquant.checkpoints.reader import TensorInfo

# These have more outputs than inputs in every model.
_WIDENING = ("c_attn", "c_fc")
# Names of an expert's output projection; its other projections read the input.
_OUT_OF_AN_EXPERT = re.compile(r"down|w2$|fc2$|out|wo$")

Tensors = Mapping[str, TensorInfo]


def find_transposed(tensors: Tensors) -> list[str]:
    """List the weights that are stored as [in, out] or [experts, in, out]."""
    weights = [name for name, info in tensors.items() if len(info.shape) in (2, 3) and not name.endswith("bias")]
    modules = _experts_by_module(tensors)
    found = [name for name in weights if _is_transposed(name, tensors, modules)]
    if any(_module(name) in CONV1D for name in found):
        # A square matrix does not show its layout, so decide for all of its kind together.
        found += [name for name in weights if _module(name) in CONV1D and len(set(tensors[name].shape)) == 1]
    chosen = set(found)
    return [name for name in weights if name in chosen]


def find_ambiguous_experts(tensors: Tensors) -> list[str]:
    """List the tensors [experts, n, n] for which no related tensor shows whether they are [..., out, in] or not."""
    modules = _experts_by_module(tensors)
    squares = [name for names in modules.values() for name in names if len(set(tensors[name].shape[1:])) == 1]
    return [name for name in squares if _is_transposed_expert(name, tensors, modules) is None]


def _is_transposed(name: str, tensors: Tensors, modules: Mapping[str, Sequence[str]]) -> bool:
    shape = tensors[name].shape
    if len(shape) == 3:
        return bool(_is_transposed_expert(name, tensors, modules))
    rows, columns = shape
    if rows == columns:
        return False
    bias = _bias(name, tensors)
    if bias is not None:
        return bias == columns
    return _module(name) in _WIDENING and rows < columns


def _is_transposed_expert(name: str, tensors: Tensors, modules: Mapping[str, Sequence[str]]) -> bool | None:
    """Return whether experts in one tensor are [experts, in, out], or None if the shapes do not show it.

    The joined gate and up projection has twice as many outputs as the down projection has inputs, so the two shapes
    fit only one way. If they have the same size, the router's columns show the number of an expert's inputs.
    """
    experts, rows, columns = tensors[name].shape
    bias = _bias(name, tensors)
    if bias is not None and rows != columns:
        return bias == columns
    for other in modules[_parent(name)]:
        if tensors[other].shape[0] == experts and (fit := _fits((rows, columns), tensors[other].shape[1:])) is not None:
            return fit
    width = _router_width(name, experts, tensors)
    if rows == columns or width not in (rows, columns):
        return None
    return (rows == width) != bool(_OUT_OF_AN_EXPERT.search(_module(name)))


def _fits(matrix: tuple[int, ...], other: tuple[int, ...]) -> bool | None:
    """Return whether two matrices of a gated expert fit only as [in, out], or None if neither order fits."""
    (rows, columns), (height, width) = matrix, other
    if (rows, columns) == (2 * width, height) or (width, height) == (rows, 2 * columns):
        return False
    if (rows, columns) == (width, 2 * height) or (width, height) == (2 * rows, columns):
        return True
    return None


def _router_width(name: str, experts: int, tensors: Tensors) -> int | None:
    """Return the columns of the router [experts, in] next to some experts, or None if there is none."""
    beside = _parent(_parent(name))
    for router in ("gate", "router"):
        info = tensors.get(f"{beside}.{router}.weight")
        if info is not None and len(info.shape) == 2 and info.shape[0] == experts:
            return info.shape[1]
    return None


def _experts_by_module(tensors: Tensors) -> dict[str, list[str]]:
    """Return the names of the tensors of three axes, by their module."""
    modules: dict[str, list[str]] = {}
    for name, info in tensors.items():
        if len(info.shape) == 3 and not name.endswith("bias"):
            modules.setdefault(_parent(name), []).append(name)
    return modules


def _bias(name: str, tensors: Tensors) -> int | None:
    """Return the length of a weight's bias, or None if it has none."""
    bias = tensors.get(f"{name.removesuffix('.weight')}.bias") or tensors.get(f"{name}_bias")
    return bias.shape[-1] if bias is not None and bias.shape else None


def _parent(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[0]


def _module(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]
