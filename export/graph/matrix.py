"""A checkpoint's weight for an exported graph: rows in the op's order, codes unchanged.

Reordering is by rows alone, which every packed format allows: scales and codes run along a row.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from diffquant.errors import DiffQuantError
from diffquant.family.heads import HeadLayout
from diffquant.family.spec import DiffSpec
from diffquant.formats.compressed_tensors import PACKED, SCALE, decode_codes
from diffquant.formats.reader import Checkpoint
from diffquant.numbers.absmax import check_finite
from diffquant.quantization.rounded_weight import RoundedWeight
from diffquant.quantization.roundings.base import Rounder
from diffquant.quantization.roundings.nearest import round_to_nearest
from diffquant.scheme import FULL, Scheme
from diffquant.source.source import Source
from diffquant.support.spelling import spelled


@dataclass(frozen=True)
class Matrix:
    """A weight [out, in], or experts' whose rows stand one behind another, read some rows at a time.

    Attributes:
        checkpoint: reader of the weight.
        stored_name: name of the weight in the checkpoint.
        name: name of the DiffTransformer parameter.
        shape: (out, in) after reordering.
        stored: scheme it is packed with in the checkpoint; 16 bits if it is not.
        wanted: scheme to quantize a plain one to.
        order: row of the checkpoint's weight at each exported row; None if no row moves.
        is_expanded: whether the graph has its values, whatever it is packed with.
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
        return self.name.removesuffix(".weight")

    @property
    def elements(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def scheme(self) -> Scheme:
        """Scheme of the exported codes; 16 bits if plain values are exported."""
        return self.stored if self.stored.quantizes else self.wanted

    @property
    def has_codes(self) -> bool:
        """Whether the graph has codes of it."""
        return self.scheme.quantizes and not self.is_expanded

    def values(self, first: int, last: int) -> Tensor:
        """Rows of a matrix that is not packed, as stored.

        Raises:
            NonFiniteError: they hold NaN or infinity.
        """
        rows = self._read_ordered(self.stored_name, first, last)
        check_finite(rows, f"{self.stored_name}, rows {first} to {last - 1},")
        return rows

    def codes(self, first: int, last: int) -> Tensor:
        """Codes of some rows, int8 [rows, in]."""
        if self.stored.quantizes:
            words = self._read_ordered(self._sibling(PACKED), first, last)
            return self.stored.format.unpack(words, self.shape[1])
        codes, self._made_scales[first, last] = self._rounded.rows(first, self.values(first, last).float())
        return codes

    def scales(self, first: int, last: int) -> Tensor:
        """Scales of some rows, [rows, groups]: one group where a row or the matrix shares one."""
        if self.stored.quantizes:
            name = self._sibling(SCALE)
            is_shared = self.checkpoint.tensors[name].shape == (1,)
            scale = self.checkpoint.read(name) if is_shared else self._read_ordered(name, first, last)
        elif (first, last) in self._made_scales:
            scale = self._made_scales.pop((first, last))
        else:
            _, scale = self._rounded.rows(first, self.values(first, last).float())
        return scale.expand(last - first, 1) if scale.numel() == 1 else scale

    def dequantized(self, first: int, last: int, scale_dtype: torch.dtype = torch.float32) -> Tensor:
        """codes · scale in float32, the scale as the exported model stores it."""
        codes, scale = self.codes(first, last), self.scales(first, last).to(scale_dtype).float()
        flat = scale.flatten()[:1] if self.scheme.sharing.spans_rows else scale
        return decode_codes(codes, flat, self.scheme)

    def floats(self, first: int, last: int) -> Tensor:
        """Rows in float32 as a reader makes them of what the checkpoint stores, or is to store."""
        return self.dequantized(first, last) if self.scheme.quantizes else self.values(first, last).float()

    @cached_property
    def _made_scales(self) -> dict[tuple[int, int], Tensor]:
        """Scales that were made with codes and not asked for yet: the data file has them behind all codes."""
        return {}

    @cached_property
    def _rounded(self) -> RoundedWeight:
        """The plain weight under absmax scales, as `quantize` stores them."""
        info = self.checkpoint.tensors[self.stored_name]

        # A scale of the whole tensor does not depend on the order of its rows, which are read fastest as they lie.
        def read(first: int, last: int) -> Tensor:
            return self.checkpoint.matrix_rows(self.stored_name, first, last)

        dtype = self.wanted.format.scale_dtype(self.checkpoint.written_dtype(self.stored_name))
        shape = _rows_and_width(info.shape)
        return RoundedWeight(Rounder(round_to_nearest), self.stored_name, read, shape, self.wanted, dtype)

    def _read_ordered(self, name: str, first: int, last: int) -> Tensor:
        if self.order is None:
            return self.checkpoint.matrix_rows(name, first, last)
        return self.checkpoint.read_rows(name, self.order[first:last])

    def _sibling(self, suffix: str) -> str:
        return self.stored_name.removesuffix(".weight") + suffix


def read_matrix(source: Source, name: str, wanted: Scheme) -> Matrix:
    """The weight of a linear, the embedding or a λ projection; nothing is read yet.

    Args:
        source: checkpoint that holds it.
        name: name of the DiffTransformer parameter.
        wanted: scheme to quantize it to if it is plain in the checkpoint.
    """
    stored_name = source.adapter.source_name(name)
    stored = source.packed.get(stored_name.removesuffix(".weight"), FULL)
    shape = _rows_and_width(source.architecture.parameters[name].shape)
    order = source.adapter.rows_as(op_layout(source.spec), name)
    scheme = FULL if stored.quantizes else wanted
    return Matrix(source.checkpoint, stored_name, name, shape, stored, scheme, order)


def _rows_and_width(shape: tuple[int, ...]) -> tuple[int, int]:
    """Number of rows, of experts those of all, and their width."""
    return math.prod(shape[:-1]), shape[-1]


def op_layout(spec: DiffSpec) -> HeadLayout:
    """The head layout of the op: a pair's maps side by side, and in V1 rotated channels side by side."""
    if spec.maps == 1:
        return spec.layout
    neighbours = spec.rope == "interleaved" or (spec.rope == "half" and not spec.shared_k)
    return replace(spec.layout, head_order="adjacent", channel_order="interleaved" if neighbours else "half")


def checked_cast(values: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Values in the exported type.

    Args:
        name: name of the weight, for the error.

    Raises:
        DiffQuantError: some are too large for it.
    """
    cast = values.to(dtype)
    if not torch.isfinite(cast.sum(dtype=torch.float64)) and not torch.isfinite(cast).all():
        raise DiffQuantError(f"{name} holds values beyond {dtype}'s range; export with {spelled('dtype', 'float32')}")
    return cast
