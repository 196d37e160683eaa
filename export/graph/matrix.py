"""A checkpoint's weight for an exported graph: rows in the op's order, codes unchanged.

Only rows are reordered, which every packed format allows, since codes and scales are stored along rows.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from diffquant.checkpoints.compressed_tensors import SCALE, codes_suffix, decode_codes
from diffquant.checkpoints.reader import Checkpoint
from diffquant.checkpoints.row_stream import check_rows_finite
from diffquant.checkpoints.source import Source
from diffquant.errors import DiffQuantError, GroupSizeError, UsageError
from diffquant.family.heads import HeadLayout
from diffquant.family.spec import DiffSpec
from diffquant.onnx.options import ExportOptions
from diffquant.quantization.rounded_weight import RoundedWeight
from diffquant.quantization.roundings.base import Rounder
from diffquant.quantization.roundings.nearest import round_to_nearest
from diffquant.recipe.scheme import FULL, Scheme
from diffquant.support.names import first_few, option_name

_BLOCKS = (256, 128, 64, 32, 16)
# If no block size divides the width, the last block is padded; short blocks need the least padding.
_PADDED_BLOCK = 32


@dataclass(frozen=True)
class Matrix:
    """A weight [out, in], or the weights of all experts, stacked along the rows.

    Methods read the rows `first` to `last` - 1, in the exported order.

    Attributes:
        checkpoint: reader of the checkpoint.
        stored_name: name of the weight in the checkpoint.
        name: name of the DiffTransformer parameter.
        shape: (out, in) after reordering.
        stored: scheme of the weight in the checkpoint; 16 bits if it is not quantized there.
        wanted: scheme to quantize the weight with if it is not quantized in the checkpoint.
        order: index of the checkpoint's row for each exported row, or None if both have the same order.
        is_expanded: whether the graph stores dequantized values even if the weight is quantized.
    """

    checkpoint: Checkpoint
    stored_name: str
    name: str
    shape: tuple[int, int]
    stored: Scheme
    wanted: Scheme
    order: Tensor | None
    is_expanded: bool = False

    @property
    def module(self) -> str:
        """Name of the DiffTransformer module that has the weight."""
        return self.name.removesuffix(".weight")

    @property
    def elements(self) -> int:
        """Number of elements of the weight."""
        return self.shape[0] * self.shape[1]

    @property
    def scheme(self) -> Scheme:
        """Scheme of the exported weight; 16 bits if it is not quantized."""
        return self.stored if self.stored.quantizes else self.wanted

    @property
    def has_codes(self) -> bool:
        """Whether the graph stores the weight as codes."""
        return self.scheme.quantizes and not self.is_expanded

    @property
    def block_size(self) -> int:
        """Number of columns that share a scale in the graph, or 0 if no kernel supports the scheme."""
        shared = self.scheme.granularity_size
        fitting = next((block for block in _BLOCKS if (shared or self.shape[1]) % block == 0), 0)
        return fitting if fitting or shared else _PADDED_BLOCK

    @property
    def blocks(self) -> int:
        """Number of blocks of a row in the graph; the last one may be padded."""
        return -(-self.shape[1] // self.block_size)

    def read_unquantized(self, first: int, last: int) -> Tensor:
        """Return rows [rows, in] of a weight that the checkpoint does not quantize, in the stored dtype.

        Raises:
            NonFiniteError: the rows contain NaN or infinity.
        """
        rows = self._read_ordered(self.stored_name, first, last)
        check_rows_finite(rows, self.stored_name, first)
        return rows

    def read_codes(self, first: int, last: int) -> Tensor:
        """Return the codes of rows, int8 [rows, in], from the checkpoint or made by rounding."""
        if self.stored.quantizes:
            words = self._read_ordered(self._sibling(codes_suffix(self.stored)), first, last)
            return self.stored.format.unpack(words, self.shape[1])
        codes, self._made_scales[first, last] = self._rounded.round_rows(
            first, self.read_unquantized(first, last).float()
        )
        return codes

    def read_scales(self, first: int, last: int) -> Tensor:
        """Return the scales of rows, [rows, groups]; there is one group if scales are per row or per tensor."""
        if self.stored.quantizes:
            name = self._sibling(SCALE)
            is_shared = self.checkpoint.tensors[name].shape == (1,)
            scale = self.checkpoint.read(name) if is_shared else self._read_ordered(name, first, last)
        elif (first, last) in self._made_scales:
            scale = self._made_scales.pop((first, last))
        else:
            _, scale = self._rounded.round_rows(first, self.read_unquantized(first, last).float())
        return scale.expand(last - first, 1) if scale.numel() == 1 else scale

    def dequantize(self, first: int, last: int, scale_dtype: torch.dtype = torch.float32) -> Tensor:
        """Return rows [rows, in] of a quantized weight in float32, as codes · scale.

        Args:
            scale_dtype: dtype to which scales are rounded before.
        """
        codes, scale = self.read_codes(first, last), self.read_scales(first, last).to(scale_dtype).float()
        flat = scale.flatten()[:1] if self.scheme.sharing.spans_rows else scale
        return decode_codes(codes, flat, self.scheme)

    def read_float32(self, first: int, last: int) -> Tensor:
        """Return rows [rows, in] in float32, dequantized if the weight is quantized."""
        return self.dequantize(first, last) if self.scheme.quantizes else self.read_unquantized(first, last).float()

    @cached_property
    def _made_scales(self) -> dict[tuple[int, int], Tensor]:
        """Scales computed together with codes and not read yet: the data file has all scales behind all codes."""
        return {}

    @cached_property
    def _rounded(self) -> RoundedWeight:
        """The weight rounded to nearest with absmax scales, as `quantize` stores it."""
        info = self.checkpoint.tensors[self.stored_name]
        # A per-tensor scale does not depend on the order of rows, so they are read in stored order, which is fastest.
        read = partial(self.checkpoint.read_matrix_rows, self.stored_name)
        dtype = self.wanted.format.scale_dtype(self.checkpoint.output_dtype(self.stored_name))
        shape = _rows_and_width(info.shape)
        return RoundedWeight(Rounder(round_to_nearest), self.stored_name, read, shape, self.wanted, dtype)

    def _read_ordered(self, name: str, first: int, last: int) -> Tensor:
        if self.order is None:
            return self.checkpoint.read_matrix_rows(name, first, last)
        return self.checkpoint.read_rows(name, self.order[first:last])

    def _sibling(self, suffix: str) -> str:
        return self.stored_name.removesuffix(".weight") + suffix


def container_bits(scheme: Scheme) -> int:
    """Return the number of bits, 4 or 8, that a code takes in the exported file."""
    return 4 if scheme.bits <= 4 else 8


def check_block_sizes(matrices: list[Matrix]) -> None:
    """Check that kernels support all number formats and group sizes, and that group sizes divide the matrices' widths.

    Raises:
        UsageError: some weights have a format other than integers.
        GroupSizeError: no kernel supports the group size of some weights, or the group size does not divide their
            width.
    """
    unread = [m for m in matrices if m.scheme.format.integer_refusal]
    if unread:
        named = first_few((f"{m.name} {m.scheme}" for m in unread), ", ")
        raise UsageError(f"cannot export {named}: {unread[0].scheme.format.integer_refusal}")
    rounded = [m for m in matrices if m.scheme.quantizes]
    refused = [
        m for m in rounded if m.shape[1] % (m.scheme.granularity_size or 1) or (m.has_codes and not m.block_size)
    ]
    if refused:
        scheme = refused[0].scheme
        widths = {m.shape[1] for m in rounded if m.scheme == scheme}
        fitting = ", ".join(f"g{block}" for block in _BLOCKS[::-1] if not any(width % block for width in widths))
        use = f"{fitting} or row" if fitting else "row" if scheme.granularity_size else "8:row"
        raise GroupSizeError(
            "no kernel reads "
            + first_few((f"{m.name} {list(m.shape)} {m.scheme}" for m in refused), ", ")
            + ": ONNX Runtime's kernels need groups of 16, 32, 64, 128 or 256 columns that divide a row; "
            f"use {use}, or quantize the model first and keep these weights at 16 bits"
        )


def accuracy_level(scheme: Scheme, options: ExportOptions) -> int:
    """Return a matmul's accuracy level in MatMulNBits: 4 for int8 activations, 1 for float32 activations.

    It is always 4 if codes take 8 bits in the file. ONNX Runtime has no kernel for these with float32 activations: it
    would dequantize all weights in every call.
    """
    return 4 if container_bits(scheme) == 8 else options.accuracy_level


def int8_block_size(matrix: Matrix, options: ExportOptions) -> int | None:
    """Return a matrix's block size if it is multiplied by int8 activations, or None if by float32 ones."""
    if not matrix.has_codes or accuracy_level(matrix.scheme, options) == 1:
        return None
    return matrix.block_size


def check_not_requantized(source: Source, weights: Scheme) -> None:
    """Check that a quantized checkpoint would not be quantized again.

    Args:
        weights: scheme that the user chose for the weights.

    Raises:
        UsageError: the checkpoint is quantized, and `weights` is not 16 bits.
    """
    if source.packed and weights.quantizes:
        raise UsageError(
            f"{source.path} has quantized weights already, which are exported unchanged; leave out "
            f"{option_name('weights')}"
        )


def open_matrix(source: Source, name: str, wanted: Scheme, layout: HeadLayout | None = None) -> Matrix:
    """Return a two-dimensional weight of a checkpoint, or experts' stacked weights, without reading the data.

    Args:
        source: checkpoint that contains the weight.
        name: name of the DiffTransformer parameter.
        wanted: scheme to quantize the weight with if it is not quantized in the checkpoint.
        layout: head layout to which the rows are reordered; by default the attention op's.
    """
    stored_name = source.adapter.source_name(name)
    stored = source.packed.get(stored_name.removesuffix(".weight"), FULL)
    shape = _rows_and_width(source.architecture.parameters[name].shape)
    order = source.adapter.layout_row_order(layout or attention_head_layout(source.spec), name)
    scheme = FULL if stored.quantizes else wanted
    return Matrix(source.checkpoint, stored_name, name, shape, stored, scheme, order)


def _rows_and_width(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the number of rows over all experts, and the width of a row."""
    return math.prod(shape[:-1]), shape[-1]


def attention_head_layout(spec: DiffSpec) -> HeadLayout:
    """Return the head layout that the attention op expects; for a Transformer, it is the model's own.

    A pair's heads are adjacent. In DIFF V1, so are the two channels that RoPE rotates together.
    """
    if spec.maps == 1:
        return spec.layout
    neighbours = spec.rope == "interleaved" or (spec.rope == "half" and not spec.shared_k)
    return replace(spec.layout, head_order="adjacent", channel_order="interleaved" if neighbours else "half")


def checked_cast(values: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Cast values to a dtype, and check that they fit into its range.

    Args:
        name: name of the weight, for the error message.

    Raises:
        DiffQuantError: some values are beyond the range.
    """
    cast = values.to(dtype)
    if not torch.isfinite(cast.sum(dtype=torch.float64)) and not torch.isfinite(cast).all():
        raise DiffQuantError(f"{name} has values beyond {dtype}'s range; export with {option_name('dtype', 'float32')}")
    return cast
