"""bitsandbytes' layouts: nf4 and fp4 of 4 bits, and int8.

A 4-bit matrix is flattened by rows and cut into blocks that share a scale. weight holds two codes per byte, the first
in the high half, in uint8 or another dtype as which these bytes are viewed. weight.quant_map float32 [16] maps codes to
values. weight.absmax holds the scales: float32 [blocks], or uint8 with weight.nested_quant_map float32 [256],
weight.nested_absmax float32 [⌈blocks/256⌉] and an offset. weight.quant_state.bitsandbytes__nf4 (or __fp4) is JSON in
uint8. An int8 matrix is weight int8 [out, in] and SCB float32 [out]: w = weight · SCB · (1/127).

Products are computed in float32 in the library's order, so that they equal the library's bit for bit.

Source: bitsandbytes 0.50, functional.py and backends/default/ops.py.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from diffquant.checkpoints.dequantized import EncodedMatrix, QuantizedMatrices, register
from diffquant.checkpoints.dequantized.checker import LayoutChecker
from diffquant.checkpoints.dequantized.floats import model_dtype
from diffquant.checkpoints.reader import Checkpoint
from diffquant.support.devices import DTYPES
from diffquant.support.plain_data import parse_json

_STATE = ".weight.quant_state.bitsandbytes__"
_KINDS = ("nf4", "fp4")
# 1/127 as the library writes it.
_STEP = 7.874015718698502e-3


@register("bitsandbytes")
def read_bitsandbytes(_entry: Mapping[str, Any], stored: Checkpoint) -> QuantizedMatrices:
    """Read the matrices of a bitsandbytes folder, each of which states its own format.

    Raises:
        CheckpointError: tensors do not match the layouts; the message names the first.
    """
    checker = LayoutChecker(stored, "bitsandbytes")
    matrices: dict[str, EncodedMatrix | None] = {}
    kinds: list[str] = []
    for kind in _KINDS:
        for module in checker.modules_with(_STATE + kind):
            kinds.append(kind)
            matrices[f"{module}.weight"] = _read_four_bits(checker, module, kind)
    for module in checker.modules_with(".SCB"):
        kinds.append("int8")
        matrices[f"{module}.weight"] = _read_int8(checker, module)
    checker.check_all_scaled(matrices)
    checker.require_valid()
    found = {name: matrix for name, matrix in matrices.items() if matrix is not None}
    return QuantizedMatrices(f"bitsandbytes {'/'.join(dict.fromkeys(kinds))}", found)


def _read_int8(checker: LayoutChecker, module: str) -> EncodedMatrix | None:
    stored = checker.stored
    weight, scales, order = f"{module}.weight", f"{module}.SCB", f"{module}.weight_format"
    shape = checker.check_shape(weight, 2, torch.int8)
    if shape is None or not checker.check_tensor(scales, shape[:1], torch.float32):
        return None
    names = [weight, scales]
    if order in stored.tensors:
        names.append(order)
        if stored.read(order).flatten().tolist() not in ([], [0]):
            checker.problems.append(f"{order}: {weight} is in a GPU kernel's order; only row order is supported")
            return None

    def rows(indices: Tensor) -> Tensor:
        return stored.read(weight)[indices] * stored.read(scales)[indices, None] * _STEP

    return EncodedMatrix((shape[0], shape[1]), tuple(names), model_dtype(stored.config), rows)


def _read_four_bits(checker: LayoutChecker, module: str, kind: str) -> EncodedMatrix | None:
    stored = checker.stored
    weight, state_name = f"{module}.weight", f"{module}{_STATE}{kind}"
    absmax, quant_map, nested_absmax, nested_map = (
        f"{weight}.{part}" for part in ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
    )
    state = _read_state(checker, state_name)
    if state is None:
        return None
    shape, block = state["shape"], state["blocksize"]
    blocks = -(-math.prod(shape) // block)
    names = [weight, absmax, quant_map, state_name]
    fits = [checker.check_tensor(quant_map, (16,), torch.float32)]
    is_nested = nested_absmax in stored.tensors
    if is_nested:
        names += [nested_absmax, nested_map]
        outer = -(-blocks // state["nested_blocksize"])
        fits += [
            checker.check_tensor(absmax, (blocks,), torch.uint8),
            checker.check_tensor(nested_map, (256,), torch.float32),
            checker.check_tensor(nested_absmax, (outer,), torch.float32),
        ]
    else:
        fits.append(checker.check_tensor(absmax, (blocks,), torch.float32))
    info = stored.tensors.get(weight)
    nbytes = -(-math.prod(shape) // 2)
    if info is None or info.nbytes != nbytes:
        checker.problems.append(f"{weight} has {info.nbytes if info else 0} bytes, not {nbytes}")
        return None
    if not all(fits):
        return None

    def scales_of(places: Tensor) -> Tensor:
        stored_scales = stored.read(absmax)[places]
        if not is_nested:
            return stored_scales
        inner = (
            stored.read(nested_map)[stored_scales.int()]
            * stored.read(nested_absmax)[places // state["nested_blocksize"]]
        )
        return inner + torch.tensor(state["nested_offset"])

    def rows(indices: Tensor) -> Tensor:
        places = indices[:, None] * shape[1] + torch.arange(shape[1])
        pairs = stored.read(weight).reshape(-1).view(torch.uint8)[places // 2]
        codes = torch.where(places % 2 == 0, pairs >> 4, pairs & 15).int()
        return stored.read(quant_map)[codes] * scales_of(places // block)

    return EncodedMatrix((shape[0], shape[1]), tuple(names), DTYPES[state["dtype"]], rows)


def _read_state(checker: LayoutChecker, name: str) -> dict[str, Any] | None:
    """Read the stored description of a 4-bit matrix, or add a problem and return None."""
    try:
        state = parse_json(bytes(checker.stored.read(name).tolist()).decode())
        shape, sizes = state["shape"], [state["blocksize"], state.setdefault("nested_blocksize", 256)]
        state["nested_offset"] = float(state.setdefault("nested_offset", 0.0))
        fits = len(shape) == 2 and all(type(size) is int and size > 0 for size in [*shape, *sizes])
        fits = fits and state["dtype"] in DTYPES
    except (ValueError, KeyError, TypeError, AttributeError):
        fits = False
    if fits:
        return dict(state)
    checker.problems.append(f"{name} lacks the shape [out, in], blocksize or dtype of its weight")
    return None
