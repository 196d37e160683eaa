"""Linear layers and the embedding in a graph: as floats, or as codes in the container that a kernel reads.

ONNX Runtime's `MatMulNBits` has codes of 4 and 8 bits; other widths are stored in the next larger container without
loss. A stored value is code + 2^(b-1), as in compressed-tensors.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from onnx import TensorProto
from torch import Tensor
from torch.nn.functional import pad

from diffquant.onnx.graph.matrix import Matrix, accuracy_level, checked_cast, container_bits
from diffquant.onnx.graph.nodes import Graph
from diffquant.onnx.graph.op import CONTRIB, DOMAIN
from diffquant.onnx.graph.ops import MATMUL
from diffquant.onnx.graph.streaming import Rows, StreamedTensor, make_view
from diffquant.onnx.options import ExportOptions
from diffquant.recipe.numbers.packing import pack

FLOAT_KINDS = {torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16}


class Linears:
    """Adds linear layers and the embedding to a graph, and collects their tensors for the data file.

    Attributes:
        streamed: tensors of the data file, in order.
    """

    def __init__(self, graph: Graph, options: ExportOptions) -> None:
        self.graph = graph
        self.options = options
        self.streamed: list[StreamedTensor] = []
        self._streamed_names: set[str] = set()
        # Initializers that span consecutive streamed tensors: by name, the tensors' names and the shape.
        self._views: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {}

    def with_views(self, initializers: Mapping[str, TensorProto]) -> dict[str, TensorProto]:
        """Return the initializers that the graph reads: the given ones and views of them.

        A view is an initializer whose bytes are those of consecutive tensors in the data file. Tensors that are only
        parts of a view are left out.

        Args:
            initializers: initializers of the streamed tensors, by name.
        """
        views = {
            name: make_view([initializers[part] for part in parts], name, shape)
            for name, (parts, shape) in self._views.items()
        }
        stacked = {part for parts, _ in self._views.values() if len(parts) > 1 for part in parts}
        return {**{name: tensor for name, tensor in initializers.items() if name not in stacked}, **views}

    def add_products(self, x: str, matrices: Sequence[Matrix]) -> list[str]:
        """Add the matmuls of x [B, T, in] with each transposed matrix; return the names of the outputs [B, T, out].

        Quantized matrices with the same layout are stacked into one matmul, so that x is rounded once. This does not
        change the results.
        """
        if len(matrices) > 1 and self._are_alike(matrices):
            return self._stacked_products(x, matrices)
        return [
            self._code_product(x, matrix, self._codes(matrix))
            if matrix.scheme.quantizes
            # As fast as MatMul on a transposed copy, and the rows are written as stored, which a tied head can share.
            else self.graph.add("FusedMatMul", x, self._values(matrix), domain=CONTRIB, transB=1)
            for matrix in matrices
        ]

    def add_lookup(self, ids: str, matrix: Matrix, name: str) -> str:
        """Add the lookup of token ids in an embedding, and return the result's name.

        Args:
            ids: name of the token ids [B, T].
            matrix: embedding [vocabulary, D].
            name: name of the result [B, T, D].
        """
        if not matrix.scheme.quantizes:
            return self.graph.add("Gather", self._values(matrix), ids, name=name)
        codes, stored_scales = self._codes(matrix).values()
        # A tied head reads the same codes in blocks, so another shape would need a second copy. The head's scales lack
        # an axis; OpenVINO does not accept a Reshape of them, so a second initializer has the same bytes.
        scales = f"{stored_scales}_blocks"
        self._views[scales] = (stored_scales,), (matrix.shape[0], matrix.blocks, 1)
        return self.add_dequantized_rows(matrix, codes, scales, ids, f"{matrix.module}.row", (0, 0), name)

    def add_dequantized_rows(
        self,
        matrix: Matrix,
        codes: str,
        scales: str,
        places: str,
        shape_name: str,
        axes: Sequence[int],
        name: str | None = None,
    ) -> str:
        """Add the lookup of a quantized matrix's rows and their dequantization, and return the result's name.

        Args:
            matrix: quantized matrix [out, in].
            codes: name of its codes [out, blocks, bytes of a block].
            scales: name of its scales [out, blocks, 1].
            places: name of the rows' indices.
            shape_name: name of the constant with the result's shape.
            axes: sizes of the result's axes before the last, which has a row's values; 0 copies a size of `places`.
            name: name of the result; generated by default.
        """
        graph, width = self.graph, matrix.shape[1]
        blocks = graph.add(
            "GatherBlockQuantized",
            codes,
            places,
            scales,
            domain=CONTRIB,
            bits=container_bits(matrix.scheme),
            block_size=matrix.block_size,
            gather_axis=0,
            quantize_axis=2,
        )
        # The last block may be padded.
        padded = matrix.blocks * matrix.block_size
        shape = graph.int64(shape_name, (*axes, padded))
        if padded == width:
            return graph.add("Reshape", blocks, shape, name=name)
        bounds = [graph.int64(f"column.{place}", (place,)) for place in (0, width, -1)]
        return graph.add("Slice", graph.add("Reshape", blocks, shape), *bounds, name=name)

    def _are_alike(self, matrices: Sequence[Matrix]) -> bool:
        """Return whether all matrices are quantized with the same layout, so that they can be stacked."""
        if not all(matrix.scheme.quantizes for matrix in matrices):
            return False
        layouts = {(container_bits(m.scheme), m.block_size, m.shape[1:]) for m in matrices}
        return len(layouts) == 1

    def _stacked_products(self, x: str, matrices: Sequence[Matrix]) -> list[str]:
        heights = [matrix.shape[0] for matrix in matrices]
        parent = matrices[0].module.rpartition(".")[0]
        name = f"{parent}.{'+'.join(matrix.module.rpartition('.')[2] for matrix in matrices)}"
        parts = [self.make_stored_tensors(matrix) for matrix in matrices]
        stored = {}
        for what in ("codes", "scales"):
            tensors = [part[what] for part in parts]
            for place, tensor in enumerate(tensors):
                self.add_tensor(replace(tensor, follows=place > 0))
            stored[what] = f"{name}{tensors[0].name.removeprefix(matrices[0].module)}"
            shape = (sum(heights), *tensors[0].shape[1:])
            self._views[stored[what]] = tuple(tensor.name for tensor in tensors), shape
        y = self._code_product(x, replace(matrices[0], shape=(sum(heights), matrices[0].shape[1])), stored)
        names = [f"{matrix.module}.product" for matrix in matrices]
        sizes = self.graph.int64(f"rows.{'.'.join(map(str, heights))}", heights)
        self.graph.add_with_outputs("Split", [y, sizes], names, axis=-1)
        return names

    def _code_product(self, x: str, matrix: Matrix, stored: Mapping[str, str]) -> str:
        """Add a quantized matmul with a weight; `stored` has the names of its codes and scales."""
        out, width = matrix.shape
        level = accuracy_level(matrix.scheme, self.options)
        return self.graph.add(
            MATMUL,
            x,
            stored["codes"],
            stored["scales"],
            domain=DOMAIN if level == 4 and self.options.has_custom_matmuls else CONTRIB,
            K=width,
            N=out,
            bits=container_bits(matrix.scheme),
            block_size=matrix.block_size,
            accuracy_level=level,
        )

    def _values(self, matrix: Matrix) -> str:
        return self.add_values(f"{matrix.module}.weight", matrix.shape, matrix, matrix.read_unquantized)

    def add_values(self, name: str, shape: tuple[int, ...], matrix: Matrix, read: Rows) -> str:
        """Add values of a matrix to the data file, in the activations' type, and return the initializer's name.

        Args:
            name: name of the initializer.
            shape: shape of the initializer.
            matrix: matrix whose values they are.
            read: function that returns the entries `first` to `last` - 1 of the shape's first axis, given these two.
        """
        dtype, entries = self.options.torch_dtype, math.prod(shape[1:])

        def make(first: int, last: int) -> Tensor:
            return checked_cast(read(first, last), dtype, matrix.stored_name)

        return self.add_tensor(StreamedTensor(name, FLOAT_KINDS[dtype], shape, entries * dtype.itemsize, entries, make))

    def _codes(self, matrix: Matrix) -> dict[str, str]:
        """Stream a quantized matrix; return the names of its initializers by "codes" and "scales"."""
        return {what: self.add_tensor(tensor) for what, tensor in self.make_stored_tensors(matrix).items()}

    def make_stored_tensors(self, matrix: Matrix) -> dict[str, StreamedTensor]:
        """Return a quantized matrix as two tensors of the data file, by the names "codes" and "scales"."""
        out, width = matrix.shape
        bits = container_bits(matrix.scheme)
        blocks, padded = matrix.blocks, matrix.blocks * matrix.block_size
        shape = (out, blocks, matrix.block_size * bits // 8)
        dtype = self.options.torch_dtype

        def make_codes(first: int, last: int) -> Tensor:
            codes = pad(matrix.read_codes(first, last), (0, padded - width))
            return to_stored_bytes(codes, bits)

        def make_scales(first: int, last: int) -> Tensor:
            scales = checked_cast(matrix.read_scales(first, last), dtype, matrix.stored_name)
            return scales.repeat_interleave(blocks // scales.shape[1], 1)

        row, scale_row = padded * bits // 8, blocks * dtype.itemsize
        scale_kind, module = FLOAT_KINDS[dtype], matrix.module
        return {
            "codes": StreamedTensor(f"{module}.weight_codes", TensorProto.UINT8, shape, row, width, make_codes),
            "scales": StreamedTensor(
                f"{module}.weight_scale", scale_kind, (out, blocks), scale_row, width, make_scales
            ),
        }

    def add_tensor(self, tensor: StreamedTensor) -> str:
        """Add a tensor to the data file, unless it has one with the same name; return the name."""
        if tensor.name not in self._streamed_names:
            self._streamed_names.add(tensor.name)
            self.streamed.append(tensor)
        return tensor.name


def to_stored_bytes(codes: Tensor, bits: int) -> Tensor:
    """Convert int8 codes [rows, n] to the bytes that the file stores, each code as code + 2^(bits-1).

    Args:
        bits: 4 or 8.

    Returns:
        uint8 [rows, n], or [rows, n / 2] for 4 bits: two codes in a byte, the first in the low half.
    """
    if bits == 8:
        return codes.view(torch.uint8) + 128
    return pack(codes, 4).view(torch.uint8)[:, : codes.shape[1] // 2]
