"""Largest magnitudes of whole weights, for formats whose scales depend on them."""

import math
import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from diffquant.formats.reader import Checkpoint
from diffquant.formats.row_stream import row_blocks
from diffquant.scheme import Scheme

# Engines make one matrix of these and keep one tensor scale of it: vLLM the largest divisor, under which the others'
# block scales would be read wrong. So they share a scale, as llm-compressor has it.
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


class Magnitudes:
    """Largest magnitude of each weight of a checkpoint and of those that engines join with it, read when asked for."""

    def __init__(self, checkpoint: Checkpoint, schemes: Mapping[str, Scheme]) -> None:
        """Nothing is read yet.

        Args:
            schemes: scheme of each module whose weight is packed, by the checkpoint's own names.
        """
        self._checkpoint, self._schemes = checkpoint, schemes
        self._guard = threading.Lock()
        self._found: dict[tuple[str, ...], Tensor] = {}

    def of(self, name: str) -> Tensor:
        """The largest magnitude [1], float32, for the weight that has a name."""
        joined = self._joined_with(name)
        with self._guard:
            if joined not in self._found:
                self._found[joined] = torch.stack([self._largest(each) for each in joined]).amax().reshape(1)
            return self._found[joined]

    def _joined_with(self, name: str) -> tuple[str, ...]:
        """The names of the weight and of those that share its scale, in one order for all of them."""
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
            largest = torch.maximum(largest, self._checkpoint.matrix_rows(name, first, last).abs().amax().float())
        return largest if len(shape) == 2 else _raised(largest, self._schemes[name.removesuffix(".weight")])


def _raised(largest: Tensor, scheme: Scheme) -> Tensor:
    """The next magnitude under which the tensor's scale of experts is a power of two.

    Some readers divide by it and others multiply by its reciprocal: so both compute the same. Block scales, which are
    floats, lose nothing by it.
    """
    divisor = scheme.format.bound_to(largest).tensor_scale
    if divisor is None:
        return largest
    top = (divisor.double() * largest).round()
    half, _ = torch.frexp(divisor)
    return (top / (divisor / (half * 2))).float().reshape(())
