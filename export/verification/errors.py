"""How far two computations of the same states are apart: stage by stage, and in the logits of whole runs."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from diffquant.errors import DiffQuantError
from diffquant.export.verification.reference import FLIPPING, WHOLE, Reading, Reference


@dataclass(frozen=True)
class StageErrors:
    """Relative errors of each stage's output.

    Attributes:
        passages: errors [T] at a passage's positions, by passage and stage.
    """

    passages: tuple[tuple[Tensor, ...], ...]

    @property
    def largest(self) -> tuple[float, ...]:
        return self.quantile(1.0)

    def quantile(self, share: float) -> tuple[float, ...]:
        """The quantile of all positions' errors at this share, by stage."""
        return tuple(float(torch.cat(parts).quantile(share)) for parts in zip(*self.passages, strict=True))

    def behind(self, firsts: Sequence[int]) -> "StageErrors":
        """Errors at the positions of each passage from a first one on; as many passages as there are first ones."""
        kept = zip(self.passages, firsts, strict=False)
        return StageErrors(tuple(tuple(errors[first:] for errors in stages) for stages, first in kept))

    def until(self, lengths: Sequence[int]) -> "StageErrors":
        """Errors at the first positions of each passage."""
        kept = zip(self.passages, lengths, strict=True)
        return StageErrors(tuple(tuple(errors[:length] for errors in stages) for stages, length in kept))


@dataclass(frozen=True)
class StageNoise:
    """Errors that rounding explains.

    Attributes:
        rounded: errors where every result is disturbed by its own rounding.
        flipped: errors where it is disturbed so much that some codes fall to their neighbours.
        many_flipped: errors where codes of every kind do.
    """

    rounded: StageErrors
    flipped: StageErrors
    many_flipped: StageErrors

    def typical(self, firsts: Sequence[int]) -> tuple[float, ...]:
        """A bound that the median over some passages' positions, from first ones on, hardly ever exceeds, by stage."""
        # A code of the cache that flips is felt by all positions behind it: passages are what chance draws, not
        # positions. Four standard errors, where a passage counts as four.
        share = 0.5 + 1 / math.sqrt(len(firsts))
        if share < 1:
            return self.rounded.behind(firsts).quantile(share)
        return self.flipped.quantile(0.9)

    @property
    def largest(self) -> float:
        """The largest error of any stage: which stage a code flips in is chance."""
        return max(self.many_flipped.largest)


def stage_errors(
    reference: Reference,
    passages: Sequence[np.ndarray],
    states: Sequence[Sequence[Tensor]],
    firsts: Sequence[int],
    readings: Sequence[Reading],
) -> StageErrors:
    """Errors of what each stage of the runtime makes of the state that it was given.

    Args:
        reference: torch twin, computing as the runtime should.
        passages: token ids [1, T].
        states: outputs of all stages [1, T, ...] for each passage, as the runtime computed them.
        firsts: first position of each passage to look at.
        readings: how each passage was read.
    """
    errors = []
    for ids, outputs, first, reading in zip(passages, states, firsts, readings, strict=False):
        with reference.reading(reading):
            wanted = _wanted(reference, ids, outputs, first)
            errors.append(
                tuple(position_errors(got[:, first:], *pair) for got, pair in zip(outputs, wanted, strict=True))
            )
    return StageErrors(tuple(errors))


def stage_noise(
    reference: Reference,
    passages: Sequence[np.ndarray],
    states: Sequence[Sequence[Tensor]],
    rounds: bool,
    reading: Reading = WHOLE,
    flips_alone: bool = False,
    whole: tuple[Sequence[np.ndarray], Sequence[Sequence[Tensor]]] | None = None,
) -> StageNoise:
    """Errors that rounding explains: of the reference's stages disturbed, given the same states.

    Args:
        reference: torch twin.
        passages: token ids [1, T].
        states: outputs of all stages for each passage, as the runtime computed them.
        rounds: whether activations are rounded.
        reading: how every passage was read.
        flips_alone: leave out `rounded`, which is `flipped` then.
        whole: passages and states to look for the largest error in, where those above are only beginnings of them: the
            largest of more positions is larger.
    """
    many = reference.flipping
    rounded = FLIPPING if flips_alone else 0.0
    # Whether a code flips at all is chance; how much a flip does is seen where many do.
    if whole is None:
        return StageNoise(*_disturbed(reference, passages, states, rounds, reading, (rounded, FLIPPING, many)))
    # The whole passages come first, since the reference then knows their beginnings.
    (many_flipped,) = _disturbed(reference, *whole, rounds, reading, (many,))
    if many != FLIPPING:
        some, flipped = _disturbed(reference, passages, states, rounds, reading, (rounded, FLIPPING))
        return StageNoise(some, flipped, many_flipped)
    (some,) = _disturbed(reference, passages, states, rounds, reading, (rounded,))
    return StageNoise(some, many_flipped.until([ids.shape[1] for ids in passages]), many_flipped)


def _disturbed(
    reference: Reference,
    passages: Sequence[np.ndarray],
    states: Sequence[Sequence[Tensor]],
    rounds: bool,
    reading: Reading,
    sizes: Sequence[float],
) -> list[StageErrors]:
    """Errors of the reference's stages, disturbed by noise of each size."""
    errors: dict[float, list[tuple[Tensor, ...]]] = {size: [] for size in sizes}
    # Rounding by a rule unknown here may differ by as much as the rounding itself.
    rounds_anew = rounds and reference.knows_rounding
    with reference.reading(reading):
        for ids, outputs in zip(passages, states, strict=True):
            with reference.arithmetic(rounds=rounds):
                wanted = list(_wanted(reference, ids, outputs))
            for size, of_size in errors.items():
                with reference.arithmetic(rounds=rounds_anew, noise=size):
                    got = [output for output, _ in _wanted(reference, ids, outputs)]
                of_size.append(tuple(position_errors(x, *pair) for x, pair in zip(got, wanted, strict=True)))
    return [StageErrors(tuple(errors[size])) for size in sizes]


def cache_excess(reference: Reference, passages: Sequence[np.ndarray], states: Sequence[Sequence[Tensor]]) -> float:
    """How much more the quantized cache rounds than one would whose scales fit these very passages.

    Args:
        reference: torch twin, which has a quantized cache and has read the passages.
        passages: token ids [1, T].
        states: outputs of all stages for each passage, as the runtime computed them.

    Returns:
        The ratio of the layers' typical errors, in the layer where it is largest.
    """
    given = reference.cache
    if given is None:
        raise DiffQuantError("the model has no quantized cache to measure")
    caches = (given, given.fitted())
    errors: list[list[tuple[Tensor, ...]]] = [[], []]
    # Neither the embedding nor the head has a cache.
    layers = range(1, reference.layers + 1)
    for ids, outputs in zip(passages, states, strict=True):
        with reference.cache_of(None):
            wanted = list(_wanted(reference, ids, outputs, numbers=layers))
        for of_cache, cache in zip(errors, caches, strict=True):
            with reference.cache_of(cache):
                rounded = [output for output, _ in _wanted(reference, ids, outputs, numbers=layers)]
            of_cache.append(tuple(position_errors(x, *pair) for x, pair in zip(rounded, wanted, strict=True)))
    typical = (StageErrors(tuple(of_cache)).quantile(0.5) for of_cache in errors)
    # NumPy's maximum is NaN where some ratio is.
    return float(np.max([rounded / max(fitted, 1e-30) for rounded, fitted in zip(*typical, strict=True)]))


def position_errors(got: Tensor, wanted: Tensor, before: Tensor) -> Tensor:
    """RMS of the difference at each position [B·T], relative to that of what the stage adds to the state before it."""
    return _rms(got - wanted) / _rms(wanted - before).clamp(min=1e-30)


def relative_rms(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Root mean square of the difference over that of the wanted logits about their mean at each position.

    Args:
        pairs: got and wanted logits [1, T, V], a pair for each passage.
    """
    difference = spread = 0.0
    for got, wanted in pairs:
        difference += float(_norm(got - wanted).double().square().sum())
        spread += float(_norm(wanted - wanted.mean(-1, keepdim=True)).double().square().sum())
    return math.sqrt(difference / max(spread, 1e-30))


def _wanted(
    reference: Reference,
    ids: np.ndarray,
    outputs: Sequence[Tensor],
    first: int = 0,
    numbers: Iterable[int] | None = None,
) -> Iterable[tuple[Tensor, Tensor]]:
    """Each stage's output as the reference has it, and what it is to be compared with to tell what the stage added.

    Args:
        first: first position that is wanted.
        numbers: stages that are wanted; all by default.
    """
    last = len(outputs) - 1
    for number in range(len(outputs)) if numbers is None else numbers:
        given = outputs[number - 1] if number else torch.from_numpy(ids)
        wanted = reference.stage(number, given, first)
        if number == 0:
            yield wanted, torch.zeros_like(wanted)
        elif number == last:
            yield wanted, wanted.mean(-1, keepdim=True)
        else:
            yield wanted, given[:, first:]


def _rms(x: Tensor) -> Tensor:
    return (_norm(x) / math.sqrt(x.shape[-1])).flatten()


def _norm(x: Tensor) -> Tensor:
    """Length of x along its last axis in float32, summed in parts: in float64 the sum takes twenty times as long."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return length
