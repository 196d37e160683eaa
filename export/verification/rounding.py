"""Rounding in the reference: activations to int8 by ONNX Runtime's rule, and noise as large as rounding errors.

The rule is not documented and may differ between CPUs, so it is measured: a quantized matmul with the identity matrix
returns its rounded input.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import onnxruntime as ort
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor
from torch.nn.functional import pad

from diffquant.onnx.graph.op import CONTRIB
from diffquant.onnx.options import DEFAULT_OPSET, IR_VERSION

# Maps activations [..., K] and the weight's block size (columns that share a scale) to rounded activations.
Rounding = Callable[[Tensor, int], Tensor]

# Largest relative RMS error of a matching rule: a wrong one is off by 1e-2, the right one by a few 1e-5.
_SAME = 1e-3
_INT8_ACTIVATIONS = 4


def round_by_block(x: Tensor, block: int) -> Tensor:
    """Round activations to int8 with a scale of absmax / 127 per block of columns, and dequantize them.

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
    """Round activations to int8 with a scale of absmax / 127 per token, and dequantize them.

    Args:
        x: [..., K] floats.
        block: not used; every rule has this argument.
    """
    return round_by_block(x, x.shape[-1])


def leave_unrounded(x: Tensor, block: int) -> Tensor:  # noqa: ARG001  nothing is rounded
    """Return activations unchanged: the rule of kernels that compute in float32 where int8 is allowed.

    Args:
        x: [..., K] floats.
        block: not used; every rule has this argument.
    """
    return x


def make_cached_rounding() -> Callable[[Tensor, Rounding, int], Tensor]:
    """Return a function that rounds activations, and keeps its last result for a next call with the same arguments.

    The function's arguments are activations [..., K], the rounding rule, and the block size of the matmul's weight.
    """
    last: tuple[Tensor, Rounding, int, Tensor] | None = None

    def round_input(x: Tensor, rounding: Rounding, block: int) -> Tensor:
        nonlocal last
        if last is None or last[0] is not x or last[1:3] != (rounding, block):
            last = x, rounding, block, rounding(x, block)
        return last[3]

    return round_input


@cache
def find_activation_rounding(bits: int, block: int) -> Rounding | None:
    """Find the rule by which this machine's ONNX Runtime rounds activations, or return None if it is unknown.

    Args:
        bits: width of the weight's codes, 4 or 8.
        block: number of columns that share a scale in the weight.
    """
    rows = np.random.default_rng(0).standard_normal((17, 3 * block)).astype(np.float32)
    # Magnitudes that differ between blocks and between rows distinguish the rules.
    rows *= np.repeat([[1.0, 8.0, 3.0]], block, 1) * np.linspace(1, 5, len(rows))[:, None]
    x = torch.from_numpy(rows.astype(np.float32))
    # ONNX Runtime has different kernels for one row and for many.
    rounded = [_through_identity(part, bits, block) for part in (x[:1], x)]
    for rounding in (round_by_block, round_by_row, leave_unrounded):
        if all(_is_same(y, rounding(x[: len(y)], block)) for y in rounded):
            return rounding
    return None


def _is_same(y: Tensor, wanted: Tensor) -> bool:
    return float((y - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()) < _SAME


def _through_identity(x: Tensor, bits: int, block: int) -> Tensor:
    """Return x [M, K] multiplied by ONNX Runtime with an identity matrix of `bits`-bit codes."""
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


# Size of the table of normal numbers, and the offset between the starts of a result's consecutive rows in it.
_NORMALS, _ROW_STEP = 2**22, 61


class NoiseSource:
    """Adds random noise to results, the same after each `restart`.

    Each result reads one table of normal numbers from a random offset: drawing new numbers takes longer than most
    matmuls.
    """

    def __init__(self) -> None:
        self._random = torch.Generator()

    def restart(self) -> None:
        """Restart the sequence of random offsets."""
        self._random.manual_seed(0)

    def draw_normals(self, count: int) -> Tensor:
        """Draw new normal numbers [count]."""
        return torch.randn(count, generator=self._random)

    def add_noise(self, x: Tensor, size: float) -> Tensor:
        """Multiply x [..., N] by 1 + `size` · normal numbers."""
        rows = x.flatten(0, -2)
        disturbed: Tensor = torch.addcmul(rows, rows, self._window(*rows.shape), value=size)
        return disturbed.view(x.shape)

    def _window(self, rows: int, width: int) -> Tensor:
        """Return a view [rows, width] into the table of normal numbers, at a random offset."""
        step = min(_ROW_STEP, (_NORMALS - width) // rows)
        places = _NORMALS - width - step * (rows - 1) + 1
        start = int(torch.randint(places, (), generator=self._random))
        return _supply().as_strided((rows, width), (step, 1), start)


@cache
def _supply() -> Tensor:
    return torch.randn(_NORMALS, generator=torch.Generator())
