"""The interface of a rounding (`Rounding`), and of a rounding prepared for one checkpoint (`Rounder`)."""

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from diffquant.checkpoints.calibration import Calibration, read_calibration
from diffquant.checkpoints.reader import Checkpoint
from diffquant.checkpoints.row_stream import row_blocks
from diffquant.checkpoints.source import Source
from diffquant.checkpoints.staging import Staging
from diffquant.checkpoints.tokens import max_length
from diffquant.checkpoints.weight_source import WeightSource
from diffquant.errors import UsageError
from diffquant.recipe.rounding import RoundingSettings
from diffquant.recipe.scheme import Scheme
from diffquant.support.progress import Progress

# (source name, values [rows, in], scheme, dtype of the stored scale) -> codes int8 [rows, in], scale as stored.
Round = Callable[[str, Tensor, Scheme, torch.dtype], tuple[Tensor, Tensor]]
# Codes int8 [out, in] and stored scale, by weight name.
MadeByName = Mapping[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Rounder:
    """A rounding prepared for one checkpoint.

    Attributes:
        round: function that rounds some rows of a weight, given in float32; several threads may call it at once. It is
            not called for a scheme in which one scale covers all rows.
        identity: JSON data that, with the checkpoint, the scheme and the rounding's name, determines the result.
        made: codes int8 [out, in] and stored scale, by weight name, of weights that were rounded during preparation;
            `round` is used for the others.
        make: function that rounds the weights of `made`, and keeps finished layers in a partial folder if it gets one;
            or None if nothing is left to do.
    """

    round: Round
    identity: Mapping[str, Any] = field(default_factory=dict)
    made: MadeByName = field(default_factory=dict)
    make: Callable[[Staging | None], MadeByName] | None = None

    def finish(self, staging: Staging | None = None) -> "Rounder":
        """Return this rounder with all weights rounded that need calibration data.

        Args:
            staging: partial folder in which finished layers are kept, and those of a killed run found.
        """
        return replace(self, made=self.make(staging), make=None) if self.make else self


class Rounding(ABC):
    """A method that chooses the codes and scales of weights; the stored format does not depend on it.

    Attributes:
        name: name in recipes and for `--rounding`.
        needs_text: whether it reads calibration data, which the recipe's `RoundingSettings` select.
        options: names of the other fields of `RoundingSettings` that it uses.
        window: default number of tokens per calibration sequence.
        tokens: default number of tokens of calibration data.
        row_by_row: whether it rounds each row alone and does not support a scale per tensor or block. If false, a scale
            per tensor is chosen by absmax, and every weight gets its nearest code.
    """

    name: ClassVar[str]
    needs_text: ClassVar[bool] = False
    options: ClassVar[frozenset[str]] = frozenset()
    window: ClassVar[int] = 512
    tokens: ClassVar[int] = 16384
    row_by_row: ClassVar[bool] = True

    def count_tokens(self, settings: RoundingSettings) -> int:
        """Return the number of tokens of calibration data under the given settings."""
        if settings.samples is not None:
            return settings.samples * (settings.window or self.window)
        return settings.tokens or self.tokens

    def read_calibration(self, source: Source, settings: RoundingSettings) -> Calibration:
        """Read calibration data for a method with `needs_text`, in sequences that fit the model's positions.

        Raises:
            DiffQuantError: the data or the tokenizer cannot be read, or the window is too long for the model.
        """
        tokenizer, config, tokens = source.tokenizer, source.architecture, self.count_tokens(settings)
        window = settings.window or min(self.window, max_length(config, tokenizer), tokens)
        return read_calibration(settings.text, tokenizer, config, window, tokens, settings.seed or 0)

    @abstractmethod
    def prepare(
        self,
        source: Source | WeightSource,
        schemes: Mapping[str, Scheme],
        settings: RoundingSettings,
        progress: Progress,
    ) -> Rounder:
        """Prepare the method for a checkpoint before its first weight is rounded; `Rounder.finish` reads a model.

        Args:
            source: a 16-bit checkpoint; with `needs_text`, of an architecture that diffquant can run.
            schemes: scheme of each module whose weight is quantized, by name in the checkpoint.
            settings: options and, with `needs_text`, which calibration data to read and how much.
            progress: called while calibration data is processed.

        Raises:
            DiffQuantError: the checkpoint or the calibration data cannot be read.
        """


ROUNDINGS: dict[str, Rounding] = {}


def register(rounding: Rounding) -> None:
    """Register a rounding, so that recipes can use its name.

    Raises:
        UsageError: the name is taken.
    """
    if rounding.name in ROUNDINGS:
        raise UsageError(f"there is a rounding {rounding.name!r} already; give the new one another name")
    ROUNDINGS[rounding.name] = rounding


# Engines fuse these weights into one matrix with one tensor scale. vLLM keeps the largest divisor, so the block scales
# of the other weights would be misread. They therefore share a tensor scale, as in llm-compressor.
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


class Magnitudes:
    """Computes, on demand, the largest magnitude over a weight and the weights that engines fuse with it."""

    def __init__(self, checkpoint: Checkpoint, schemes: Mapping[str, Scheme]) -> None:
        """Prepare without reading weights; `largest_magnitude` reads them.

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
