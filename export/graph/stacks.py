"""Matrices that stand one behind another in a weight: those of experts, and those of heads.

ONNX Runtime multiplies with codes that it knows beforehand; of an expert that a token chose, a graph makes values.
"""

from dataclasses import replace

import numpy as np
from torch import Tensor

from diffquant.export.graph.linears import FLOAT_KINDS, Linears, block_size, container_bits
from diffquant.export.graph.matrix import Matrix, checked_cast
from diffquant.export.graph.op import CONTRIB
from diffquant.export.graph.streaming import Streamed


def head_matrices(linears: Linears, matrix: Matrix, name: str, rows: Tensor, is_transposed: bool) -> str:
    """Name of an initializer [heads, n, in], or [heads, in, n], with a weight's values.

    Args:
        matrix: weight of all heads.
        name: name of the initializer.
        rows: rows of the weight, int64 [heads, n].
        is_transposed: whether a head's matrix is transposed.
    """
    heads, height = rows.shape
    width, dtype = matrix.shape[1], linears.options.torch_dtype
    own = replace(matrix, shape=(rows.numel(), width), order=rows.flatten())

    def make(first: int, last: int) -> Tensor:
        values = checked_cast(own.floats(first * height, last * height), dtype, matrix.stored_name)
        by_head: Tensor = values.unflatten(0, (-1, height))
        return by_head.mT if is_transposed else by_head

    shape = (heads, width, height) if is_transposed else (heads, height, width)
    entries = height * width
    return linears.stream(Streamed(name, FLOAT_KINDS[dtype], shape, entries * dtype.itemsize, entries, make))


def expert_product(linears: Linears, x: str, matrix: Matrix, experts: int, number: str) -> str:
    """Name of the product [M, out] of x [M, in] and the transposed matrix of one expert.

    Args:
        matrix: weight [experts·out, in] of all experts.
        number: name of the expert's number, an int64 scalar.
    """
    graph = linears.graph
    shape = matrix.shape[0] // experts, matrix.shape[1]
    if not matrix.scheme.quantizes:
        weight = graph.add("Gather", _values(linears, matrix, experts), number)
    else:
        weight = _gathered(linears, matrix, shape, number)
    return graph.add("FusedMatMul", x, weight, domain=CONTRIB, transB=1)


def _values(linears: Linears, matrix: Matrix, experts: int) -> str:
    """Name of the values [experts, out, in]."""
    dtype, (rows, width) = linears.options.torch_dtype, matrix.shape
    height = rows // experts

    def make(first: int, last: int) -> Tensor:
        return checked_cast(matrix.values(first * height, last * height), dtype, matrix.stored_name)

    shape, entries = (experts, height, width), height * width
    name = f"{matrix.module}.weight"
    return linears.stream(Streamed(name, FLOAT_KINDS[dtype], shape, entries * dtype.itemsize, entries, make))


def _gathered(linears: Linears, matrix: Matrix, shape: tuple[int, int], number: str) -> str:
    """Name of an expert's values [out, in], of its codes."""
    graph, (out, width) = linears.graph, shape
    layout = linears.layout(matrix)
    scales = replace(layout["scales"], shape=(*layout["scales"].shape, 1))
    codes, scales_name = linears.stream(layout["codes"]), linears.stream(scales)
    first = graph.add("Mul", number, graph.constant(f"expert.height.{out}", np.array(out, np.int64)))
    rows = graph.add("Add", graph.constant(f"expert.rows.{out}", np.arange(out)), first)
    block = block_size(matrix.scheme, width) or width
    blocks = graph.add(
        "GatherBlockQuantized",
        codes,
        rows,
        scales_name,
        domain=CONTRIB,
        bits=container_bits(matrix.scheme),
        block_size=block,
        gather_axis=0,
        quantize_axis=2,
    )
    return linears.row_of_blocks(blocks, f"expert.row.{out}.{width}", (out,), width, block)
