"""Activations that ONNX Runtime's products round to int8, rounded in torch by the same rule.

The rule is the runtime's own affair and may differ between processors, so it is asked for: a product with the
identity returns its input as it was rounded.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import onnxruntime as ort
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor
from torch.nn.functional import pad

from diffquant.export.graph.op import CONTRIB
from diffquant.export.options import DEFAULT_OPSET, IR_VERSION

# From activations [..., K] and the block of columns that share a scale in the weight, to their rounded values.
Rounding = Callable[[Tensor, int], Tensor]

# A wrong rule is off by about a hundredth; the identity's product with 8-bit codes by a few hundred-thousandths.
_SAME = 1e-3
_INT8_ACTIVATIONS = 4


def round_by_block(x: Tensor, block: int) -> Tensor:
    """Activations rounded to int8 with a scale for each block of columns: absmax / 127.

    Args:
        x: [..., K] floats; the last block may be shorter.
        block: number of columns that share a scale.

    Source: QuantizeARow_CompInt8 of ONNX Runtime's MLAS, `sqnbitgemm_kernel_avx*.cpp`.
    """
    width = x.shape[-1]
    whole = pad(x, (0, -width % block)) if width % block else x
    blocks = whole.unflatten(-1, (-1, block))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    codes = (blocks / torch.where(scale == 0, 1.0, scale)).round_()
    rounded: Tensor = codes.mul_(scale).flatten(-2)[..., :width]
    return rounded


def round_by_row(x: Tensor, block: int) -> Tensor:  # noqa: ARG001  the weight's blocks do not matter here
    """Activations rounded to int8 with a scale for each token: absmax / 127."""
    return round_by_block(x, x.shape[-1])


def keep(x: Tensor, block: int) -> Tensor:  # noqa: ARG001  nothing is rounded
    """Activations as they are, for a kernel that computes in float32 although it may round."""
    return x


class RoundedInputs:
    """Rounds what products take: once where several that follow each other take the same activations."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, Rounding, int, Tensor] | None = None

    def of(self, x: Tensor, rounding: Rounding, block: int) -> Tensor:
        """Activations x [..., K] as a product with a weight of such blocks rounds them."""
        if self._last is not None and self._last[0] is x and self._last[1:3] == (rounding, block):
            return self._last[3]
        rounded = rounding(x, block)
        self._last = x, rounding, block, rounded
        return rounded


@cache
def runtime_rounding(bits: int, block: int) -> Rounding | None:
    """The rule by which this machine's ONNX Runtime rounds activations; None if it is none of those known.

    Args:
        bits: width of the weight's codes, 4 or 8.
        block: number of columns that share a scale in the weight.
    """
    rows = np.random.default_rng(0).standard_normal((17, 3 * block)).astype(np.float32)
    # Scales that differ from block to block and from row to row tell the rules apart.
    rows *= np.repeat([[1.0, 8.0, 3.0]], block, 1) * np.linspace(1, 5, len(rows))[:, None]
    x = torch.from_numpy(rows.astype(np.float32))
    # One row and many go through different kernels.
    rounded = [_through_identity(part, bits, block) for part in (x[:1], x)]
    for rounding in (round_by_block, round_by_row, keep):
        if all(_is_same(y, rounding(x[: len(y)], block)) for y in rounded):
            return rounding
    return None


def _is_same(y: Tensor, wanted: Tensor) -> bool:
    return float((y - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()) < _SAME


def _through_identity(x: Tensor, bits: int, block: int) -> Tensor:
    """x [M, K] after a product with the identity whose codes have this width."""
    width = x.shape[1]
    codes = np.full((width, width), 2 ** (bits - 1), np.uint8)
    np.fill_diagonal(codes, 2 ** (bits - 1) + 1)
    stored = codes if bits == 8 else codes[:, 0::2] | codes[:, 1::2] << 4
    scales = np.ones((width, width // block), np.float32)
    initializers = [
        numpy_helper.from_array(stored.reshape(width, width // block, -1), "codes"),
        numpy_helper.from_array(scales, "scales"),
    ]
    node = helper.make_node(
        "MatMulNBits",
        ["x", "codes", "scales"],
        ["y"],
        domain=CONTRIB,
        K=width,
        N=width,
        bits=bits,
        block_size=block,
        accuracy_level=_INT8_ACTIVATIONS,
    )
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, list(x.shape)) for name in ("x", "y")]
    graph = helper.make_graph([node], "identity", values[:1], values[1:], initializers)
    imports = [helper.make_opsetid("", DEFAULT_OPSET), helper.make_opsetid(CONTRIB, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"x": x.numpy()})[0])
