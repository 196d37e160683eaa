"""Finds the largest magnitudes of whole weights, for formats with a scale per tensor above the block scales."""

import math
import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from diffquant.checkpoints.reader import Checkpoint
from diffquant.checkpoints.row_stream import row_blocks
from diffquant.recipe.scheme import Scheme

# Engines fuse these weights into one matrix with one tensor scale. vLLM keeps the largest divisor, so the block scales
# of the other weights would be misread. They therefore share a tensor scale, as in llm-compressor.
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


class Magnitudes:
    """Computes, on demand, the largest magnitude over a weight and the weights that engines fuse with it."""

    def __init__(self, checkpoint: Checkpoint, schemes: Mapping[str, Scheme]) -> None:
        """Prepare without reading weights, which `largest_magnitude` does.

        Args:
            checkpoint: checkpoint with 16-bit weights.
            schemes: scheme of each module whose weight is packed, by name in the checkpoint.
        """
        self._checkpoint, self._schemes = checkpoint, schemes
        self._guard = threading.Lock()
        self._found: dict[tuple[str, ...], Tensor] = {}

    def largest_magnitude(self, name: str) -> Tensor:
        """Return the largest magnitude [1], float32, over the named weight and those that share its tensor scale."""
        joined = self._joined_with(name)
        with self._guard:
            if joined not in self._found:
                self._found[joined] = torch.stack([self._largest(each) for each in joined]).amax().reshape(1)
            return self._found[joined]

    def _joined_with(self, name: str) -> tuple[str, ...]:
        """Return the names of a weight and of those that share its tensor scale, always in the same order."""
        module = name.removesuffix(".weight")
        stem, _, last = module.rpartition(".")
        group = next((each for each in _JOINED if last in each), (last,))
        scheme = self._schemes[module]
        alike = [f"{stem}.{each}" for each in group if self._schemes.get(f"{stem}.{each}") == scheme]
        ending = name.removeprefix(module)
        return tuple(each + ending for each in alike) if stem else (name,)

    def _largest(self, name: str) -> Tensor:
        shape = self._checkpoint.tensors[name].shape
        largest = torch.zeros((), dtype=torch.float32)
        for first, last in row_blocks(math.prod(shape[:-1]), shape[-1]):
            largest = torch.maximum(largest, self._checkpoint.read_matrix_rows(name, first, last).abs().amax().float())
        return largest if len(shape) == 2 else _round_up(largest, self._schemes[name.removesuffix(".weight")])


def _round_up(largest: Tensor, scheme: Scheme) -> Tensor:
    """Round a magnitude up until the experts' tensor scale is a power of two.

    Some engines divide by that scale and others multiply by its reciprocal, which is exact only for powers of two.
    Block scales are floats, so they lose no precision.
    """
    divisor = scheme.format.with_tensor_scale(largest).tensor_scale
    if divisor is None:
        return largest
    top = (divisor.double() * largest).round()
    half, _ = torch.frexp(divisor)
    return (top / (divisor / (half * 2))).float().reshape(())
