"""A checkpoint's weight as an exported graph wants it: rows in the op's order, codes carried over as they are.

Reordering is by rows alone, which every packed format allows: scales and codes run along a row.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from diffquant.errors import DiffQuantError
from diffquant.family.heads import HeadLayout
from diffquant.family.spec import DiffSpec
from diffquant.formats.compressed_tensors import PACKED, SCALE, decode_codes, weight_codes, weight_scale
from diffquant.formats.reader import Checkpoint
from diffquant.model.adapters import Adapter
from diffquant.numerics import check_finite, unpack
from diffquant.scheme import FULL, Scheme
from diffquant.source.source import Source


@dataclass(frozen=True)
class Matrix:
    """A weight [out, in], read some rows at a time.

    Attributes:
        checkpoint: reader of the weight.
        source: name of the weight in the checkpoint.
        name: name of the DiffTransformer parameter.
        shape: (out, in) after reordering.
        stored: scheme it is packed with in the checkpoint; 16 bits where it is not.
        wanted: scheme to quantize a plain one to.
        order: source row of each row; None where they are the same.
    """

    checkpoint: Checkpoint
    source: str
    name: str
    shape: tuple[int, int]
    stored: Scheme
    wanted: Scheme
    order: Tensor | None

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def scheme(self) -> Scheme:
        """Scheme of the exported codes; 16 bits where values are exported."""
        return self.stored if self.stored.quantizes else self.wanted

    def values(self, first: int, last: int) -> Tensor:
        """Rows of a matrix that is not quantized, as stored."""
        rows = self._rows(self.source, first, last)
        check_finite(rows, f"{self.source}, rows {first} to {last - 1},")
        return rows

    def codes(self, first: int, last: int) -> Tensor:
        """int8 [rows, in] codes."""
        if self.stored.quantizes:
            words = self._rows(self._sibling(PACKED), first, last)
            return unpack(words, self.stored.bits, self.shape[1])
        values = self.values(first, last)
        return weight_codes(values.float(), self._scale_of(values), self.wanted)

    def scales(self, first: int, last: int) -> Tensor:
        """[rows, groups] scales, one group where a row or the matrix shares one."""
        if self.stored.quantizes:
            stored = self._sibling(SCALE)
            shared = self.checkpoint.tensors[stored].shape == (1,)
            scale = self.checkpoint.read(stored) if shared else self._rows(stored, first, last)
        else:
            scale = self._scale_of(self.values(first, last))
        return scale.expand(last - first, 1) if scale.numel() == 1 else scale

    def dequantized(self, first: int, last: int) -> Tensor:
        """codes · scale as the exported model computes it, in float32."""
        scale = self.scales(first, last).float()
        flat = scale.flatten()[:1] if self.scheme.granularity == "tensor" else scale
        return decode_codes(self.codes(first, last), flat, self.scheme)

    @cached_property
    def _whole_scale(self) -> Tensor:
        return weight_scale(self.checkpoint.read(self.source), self.wanted)

    def _scale_of(self, rows: Tensor) -> Tensor:
        return self._whole_scale if self.wanted.granularity == "tensor" else weight_scale(rows, self.wanted)

    def _rows(self, name: str, first: int, last: int) -> Tensor:
        return self.checkpoint.read_rows(name, slice(first, last) if self.order is None else self.order[first:last])

    def _sibling(self, suffix: str) -> str:
        return self.source.removesuffix(".weight") + suffix


def read_matrix(opened: Source, name: str, shape: tuple[int, int], wanted: Scheme) -> Matrix:
    """A linear's, the embedding's or a λ projection's weight.

    Args:
        name: name of the DiffTransformer parameter.
        shape: (out, in) of the DiffTransformer parameter.
        wanted: scheme to quantize it to where the checkpoint holds it plain.
    """
    stored_name = opened.adapter.source_name(name)
    stored = opened.packed.get(stored_name.removesuffix(".weight"), FULL)
    order = row_order(opened.adapter, name)
    return Matrix(opened.checkpoint, stored_name, name, shape, stored, FULL if stored.quantizes else wanted, order)


def read_vector(opened: Source, name: str) -> Tensor:
    """A norm's weight, a bias or a λ vector, reordered as its matrix; float32.

    Raises:
        NonFiniteError: it holds NaN or infinity.
    """
    vector = opened.read(name)
    check_finite(vector, opened.adapter.source_name(name))
    order = row_order(opened.adapter, name)
    return (vector if order is None else vector[order]).float()


def row_order(adapter: Adapter, name: str) -> Tensor | None:
    """Source row of each exported row of a parameter; None where they are the same."""
    return adapter.rows_as(op_layout(adapter.config.diff_spec), name)


def op_layout(spec: DiffSpec) -> HeadLayout:
    """The op's head layout: a pair's maps side by side, and in V1 rotated channels side by side."""
    if spec.maps == 1:
        return spec.layout
    neighbours = spec.rope == "interleaved" or (spec.rope == "half" and not spec.shared_k)
    return replace(spec.layout, head_order="adjacent", channel_order="interleaved" if neighbours else "half")


def checked_cast(values: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Values in the exported type.

    Raises:
        DiffQuantError: some are too large for it.
    """
    cast = values.to(dtype)
    if not torch.isfinite(cast.sum(dtype=torch.float64)) and not torch.isfinite(cast).all():
        raise DiffQuantError(f"{name} holds values beyond {dtype}'s range; export with --dtype float32")
    return cast
