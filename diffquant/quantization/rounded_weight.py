"""A weight under a rounding: its codes and scales, some rows at a time, and the values that a reader makes of them."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from diffquant.formats.compressed_tensors import decode_codes, weight_codes
from diffquant.formats.row_stream import in_order, row_blocks, workers
from diffquant.quantization.magnitudes import Magnitudes
from diffquant.quantization.roundings.base import Rounder
from diffquant.scheme import Scheme

# (first row, last row exclusive) -> those rows [n, in].
ReadRows = Callable[[int, int], Tensor]


class RoundedWeight:
    """A weight [out, in] whose codes and scales are made as rows are asked for, by any number of threads."""

    def __init__(
        self,
        rounder: Rounder,
        name: str,
        read: ReadRows,
        shape: tuple[int, ...],
        scheme: Scheme,
        dtype: torch.dtype,
        magnitudes: Magnitudes | None = None,
    ) -> None:
        """Prepare a weight whose rows are read when they are needed.

        Args:
            rounder: rounding made ready for the checkpoint.
            name: the weight's name in the checkpoint.
            read: function that gives rows from first to last (exclusive), finite floats.
            shape: (out, in).
            scheme: granularity tensor, row, group or block, whose rows are asked for together.
            dtype: dtype of the stored scale.
            magnitudes: largest magnitudes of the checkpoint's weights, where some share a scale of the tensor; those of
                this weight by default.
        """
        self._magnitudes = magnitudes
        self._rounder, self._name, self._read, self._shape = rounder, name, read, shape
        self._scheme, self._dtype = scheme, dtype
        self._guard = threading.Lock()
        self._magnitude: Tensor | None = None
        self._bound: Scheme | None = None

    def rows(self, first: int, values: Tensor) -> tuple[Tensor, Tensor]:
        """Codes int8 [rows, in] and stored scale of the rows from `first` on, whose values are float32."""
        if self._name in self._rounder.made:
            codes, scale = self._rounder.made[self._name]
            return codes[first : first + len(values)], scale[first : first + len(values)]
        if not self._scheme.sharing.spans_rows:
            return self._rounder.round(self._name, values, self.scheme, self._dtype)
        scale = self._scheme.format.scale(self._largest(), 0, self._dtype)
        return weight_codes(values, scale, self._scheme), scale

    @property
    def scheme(self) -> Scheme:
        """The scheme, bound to the weight where its format's scales depend on all of it."""
        if not self._scheme.format.spans_tensor:
            return self._scheme
        if self._bound is None:
            known = self._magnitudes
            self._bound = self._scheme.bound_to(self._largest() if known is None else known.of(self._name))
        return self._bound

    def _largest(self) -> Tensor:
        """The largest magnitude [1] of the weight, found by whichever thread needs it first."""
        with self._guard:
            if self._magnitude is None:
                # One number at a time: a small tensor kept for each block would lie where the block's memory was, and
                # no later block would fit there.
                largest = torch.zeros((), dtype=torch.float32)
                for first, last in row_blocks(*self._shape):
                    block_largest = self._read(first, last).abs().amax()
                    largest = torch.maximum(largest.to(block_largest.dtype), block_largest)
                self._magnitude = largest.reshape(1)
            return self._magnitude


def as_stored(
    rounder: Rounder,
    name: str,
    weight: Tensor,
    scheme: Scheme,
    dtype: torch.dtype | None = None,
    magnitudes: Magnitudes | None = None,
) -> Tensor:
    """A weight as it is read back from the checkpoint that `quantize` writes, bit for bit.

    Args:
        rounder: rounding made ready for the checkpoint.
        name: the weight's name in the checkpoint.
        weight: [out, in] or [experts, out, in] finite floats, with the checkpoint's own rows.
        scheme: granularity tensor, row, group or block.
        dtype: dtype of the stored scale; by default that in which a weight of this dtype has its scale stored.
        magnitudes: as `RoundedWeight` takes them.

    Returns:
        codes * scale in the weight's shape and dtype.
    """
    # The rows of all experts, one after another.
    rows = weight.flatten(0, -2)

    def read(first: int, last: int) -> Tensor:
        return rows[first:last]

    dtype = dtype or scheme.format.scale_dtype(weight.dtype)
    rounded = RoundedWeight(rounder, name, read, tuple(rows.shape), scheme, dtype, magnitudes)

    def read_back(first: int, last: int) -> Tensor:
        return decode_codes(*rounded.rows(first, rows[first:last].float()), scheme).to(weight.dtype)

    # Products of matrices depend, in their last bits, on the number of rows and of threads: both are `quantize`'s own.
    blocks = row_blocks(len(rows), rows.shape[1], scheme.sharing.tile or 1)
    with workers() as pool:
        return torch.cat(list(in_order(pool, read_back, blocks))).reshape(weight.shape)
