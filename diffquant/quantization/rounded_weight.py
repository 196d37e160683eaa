"""Computes a weight's codes and scales under a rounding, a block of rows at a time, and the dequantized values."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from diffquant.checkpoints.compressed_tensors import decode_codes, weight_codes
from diffquant.checkpoints.row_stream import map_in_order, open_workers, row_blocks
from diffquant.quantization.roundings.base import Magnitudes, Rounder
from diffquant.recipe.scheme import Scheme

# (first row, last row exclusive) -> those rows [n, in].
ReadRows = Callable[[int, int], Tensor]


class RoundedWeight:
    """A weight [out, in] whose codes and scales are computed on demand; safe to use from several threads."""

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
            rounder: rounding prepared for the checkpoint.
            name: the weight's name in the checkpoint.
            read: function that returns rows from first to last (exclusive), finite floats.
            shape: (out, in).
            scheme: scheme of granularity tensor, row, group or block; the rows of a block must be requested together.
            dtype: dtype of the stored scale.
            magnitudes: largest magnitudes for weights that share a tensor scale; by default only this weight's.
        """
        self._magnitudes = magnitudes
        self._rounder, self._name, self._read, self._shape = rounder, name, read, shape
        self._scheme, self._dtype = scheme, dtype
        self._guard = threading.Lock()
        self._magnitude: Tensor | None = None
        self._bound: Scheme | None = None

    def round_rows(self, first: int, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes int8 [rows, in] of consecutive rows, and their stored scale.

        The scale has the shape that `weight_scale` returns for these rows.

        Args:
            first: index of the first of these rows in the weight.
            values: the rows [rows, in] in float32.
        """
        if self._name in self._rounder.made:
            codes, scale = self._rounder.made[self._name]
            return codes[first : first + len(values)], scale[first : first + len(values)]
        if not self._scheme.sharing.spans_rows:
            return self._rounder.round(self._name, values, self.scheme, self._dtype)
        scale = self._scheme.format.compute_scale(self._largest(), 0, self._dtype)
        return weight_codes(values, scale, self._scheme), scale

    @property
    def scheme(self) -> Scheme:
        """The weight's scheme; for a format with a scale per tensor, it includes that scale."""
        if not self._scheme.format.spans_tensor:
            return self._scheme
        if self._bound is None:
            known = self._magnitudes
            self._bound = self._scheme.with_tensor_scale(
                self._largest() if known is None else known.largest_magnitude(self._name)
            )
        return self._bound

    def _largest(self) -> Tensor:
        """Return the largest magnitude [1] of the weight, computed once by the first thread that needs it."""
        with self._guard:
            if self._magnitude is None:
                # Keep only a running maximum: a small tensor kept per block would fragment the freed memory, so that
                # no later block would fit into it.
                largest = torch.zeros((), dtype=torch.float32)
                for first, last in row_blocks(*self._shape):
                    block_largest = self._read(first, last).abs().amax()
                    largest = torch.maximum(largest.to(block_largest.dtype), block_largest)
                self._magnitude = largest.reshape(1)
            return self._magnitude


def quantize_as_stored(
    rounder: Rounder,
    name: str,
    weight: Tensor,
    scheme: Scheme,
    dtype: torch.dtype | None = None,
    magnitudes: Magnitudes | None = None,
) -> Tensor:
    """Return a weight quantized and dequantized, bit for bit as it is read from a checkpoint written by `quantize`.

    Args:
        rounder: rounding prepared for the checkpoint.
        name: the weight's name in the checkpoint.
        weight: [out, in] or [experts, out, in] finite floats, rows in the checkpoint's order.
        scheme: scheme of granularity tensor, row, group or block.
        dtype: dtype of the stored scale; by default the format's scale dtype for a weight of this dtype.
        magnitudes: largest magnitudes for weights that share a tensor scale; by default only this weight's.

    Returns:
        codes * scale in the weight's shape and dtype.
    """
    # The rows of all experts, one after another.
    rows = weight.flatten(0, -2)

    def read(first: int, last: int) -> Tensor:
        return rows[first:last]

    dtype = dtype or scheme.format.scale_dtype(weight.dtype)
    rounded = RoundedWeight(rounder, name, read, tuple(rows.shape), scheme, dtype, magnitudes)

    def decode_rows(first: int, last: int) -> Tensor:
        return decode_codes(*rounded.round_rows(first, rows[first:last].float()), scheme).to(weight.dtype)

    # The last bits of matrix products depend on the number of rows and threads, so both are the same as in `quantize`.
    blocks = row_blocks(len(rows), rows.shape[1], scheme.sharing.block_size or 1)
    with open_workers() as pool:
        return torch.cat(list(map_in_order(pool, decode_rows, blocks))).reshape(weight.shape)
