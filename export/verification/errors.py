"""Errors of an exported model against its torch reference: per stage, and in the logits.

A stage is the embedding, a layer, or the head behind the final norm.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from diffquant.errors import DiffQuantError
from diffquant.onnx.verification.arithmetic import FLIPPING
from diffquant.onnx.verification.caches import WHOLE, CallPattern
from diffquant.onnx.verification.reference import Reference


@dataclass(frozen=True)
class StageErrors:
    """Relative errors of the stages' outputs.

    Attributes:
        passages: `passages[i][j]` has the errors [T] of stage j at the T positions of passage i.
    """

    passages: tuple[tuple[Tensor, ...], ...]

    @property
    def largest(self) -> tuple[float, ...]:
        """Largest error of each stage."""
        return self.quantile(1.0)

    def quantile(self, share: float) -> tuple[float, ...]:
        """Return a quantile of each stage's errors over all positions of all passages.

        Args:
            share: share of errors below the quantile, 0 to 1.
        """
        return tuple(float(torch.cat(parts).quantile(share)) for parts in zip(*self.passages, strict=True))

    def select_positions(self, ranges: Iterable[slice]) -> "StageErrors":
        """Return the errors at a range of positions of each passage; without the passages that have no range."""
        kept = zip(self.passages, ranges, strict=False)
        return StageErrors(tuple(tuple(errors[each] for errors in stages) for stages, each in kept))


@dataclass(frozen=True)
class StageNoise:
    """Errors that rounding alone causes in the reference.

    Attributes:
        rounded: errors if noise as large as rounding errors is added to the output of every module.
        flipped: errors if the noise is so large that some quantized values move to a neighbouring code.
        many_flipped: errors if the noise is so large that codes of every kind move, those of logits included.
    """

    rounded: StageErrors
    flipped: StageErrors
    many_flipped: StageErrors

    def median_error_bounds(self, firsts: Sequence[int]) -> tuple[float, ...]:
        """Return, for each stage, a bound that its median error over positions rarely exceeds.

        Args:
            firsts: for each passage, the first position to count.
        """
        # A cache code that flips affects all later positions, so passages are the independent samples, not positions.
        # Four standard errors, where a passage counts as four samples.
        share = 0.5 + 1 / math.sqrt(len(firsts))
        if share < 1:
            return self.rounded.select_positions(slice(first, None) for first in firsts).quantile(share)
        return self.flipped.quantile(0.9)

    @property
    def largest(self) -> float:
        """Largest error of any stage in `many_flipped`; it bounds every stage, since codes can flip in each."""
        return max(self.many_flipped.largest)


def compute_stage_errors(
    reference: Reference,
    passages: Sequence[np.ndarray],
    states: Sequence[Sequence[Tensor]],
    firsts: Sequence[int],
    readings: Sequence[CallPattern],
) -> StageErrors:
    """Return the errors of the runtime's stages.

    The reference computes each stage from the runtime's output of the stage before, so that no error propagates.

    Args:
        reference: torch reference, set to compute as the runtime should.
        passages: token ids [1, T].
        states: for each passage, the runtime's outputs [1, T, ...] of all stages.
        firsts: for each passage, the first position to compare.
        readings: for each passage, how it was split into calls.
    """
    if any(each is not readings[0] for each in readings):
        ones = [slice(number, number + 1) for number in range(len(passages))]
        alone = [compute_stage_errors(reference, passages[i], states[i], firsts[i], readings[i]) for i in ones]
        return StageErrors(tuple(errors.passages[0] for errors in alone))
    with reference.use_call_pattern(readings[0]):
        wanted = _compute_wanted(reference, passages, states, firsts)
    got = [[x[:, first:] for x in outputs] for outputs, first in zip(states, firsts, strict=True)]
    return _compare(got, wanted)


def measure_stage_noise(
    reference: Reference,
    passages: Sequence[np.ndarray],
    states: Sequence[Sequence[Tensor]],
    rounds: bool,
    reading: CallPattern = WHOLE,
    only_flips: bool = False,
    whole: tuple[Sequence[np.ndarray], Sequence[Sequence[Tensor]]] | None = None,
) -> StageNoise:
    """Measure the errors that rounding causes, by adding noise inside each stage of the reference.

    Args:
        reference: torch reference.
        passages: token ids [1, T].
        states: for each passage, the runtime's outputs of all stages.
        rounds: whether activations are rounded to int8.
        reading: how every passage was split into calls.
        only_flips: set `StageNoise.rounded` to `flipped` instead of measuring it.
        whole: whole passages and their states, if `passages` are only their beginnings. `many_flipped` is measured on
            whole passages, since the largest error grows with the number of positions.
    """
    many = reference.flipping
    rounded = FLIPPING if only_flips else 0.0
    # It is chance whether one code flips; the effect of a flip is measured with noise that flips many.
    if whole is None:
        return StageNoise(*_disturb_stages(reference, passages, states, rounds, reading, (rounded, FLIPPING, many)))
    # Whole passages come first: the reference then has their beginnings in its memory.
    (many_flipped,) = _disturb_stages(reference, *whole, rounds, reading, (many,))
    if many != FLIPPING:
        some, flipped = _disturb_stages(reference, passages, states, rounds, reading, (rounded, FLIPPING))
        return StageNoise(some, flipped, many_flipped)
    (some,) = _disturb_stages(reference, passages, states, rounds, reading, (rounded,))
    flipped = many_flipped.select_positions(slice(ids.shape[1]) for ids in passages)
    return StageNoise(some, flipped, many_flipped)


def _disturb_stages(
    reference: Reference,
    passages: Sequence[np.ndarray],
    states: Sequence[Sequence[Tensor]],
    rounds: bool,
    reading: CallPattern,
    sizes: Sequence[float],
) -> list[StageErrors]:
    """Return the errors of the reference's stages under noise of each size."""
    errors: dict[float, StageErrors] = {}
    # If the runtime's rounding rule is unknown, the error may be as large as the rounding itself.
    rounds_anew = rounds and reference.knows_rounding
    with reference.use_call_pattern(reading):
        with reference.change_arithmetic(rounds=rounds):
            wanted = _compute_wanted(reference, passages, states)
        for size in dict.fromkeys(sizes):
            with reference.change_arithmetic(rounds=rounds_anew, noise=size):
                errors[size] = _compare(_outputs(_compute_wanted(reference, passages, states)), wanted)
    return [errors[size] for size in sizes]


def find_worst_cache_layer(
    reference: Reference, passages: Sequence[np.ndarray], states: Sequence[Sequence[Tensor]]
) -> tuple[int, float]:
    """Find the layer where a quantized cache's scales fit these passages worst.

    A layer's ratio is its median rounding error under the cache's scales, divided by that under scales fitted to the
    passages.

    Args:
        reference: torch reference with a quantized cache, which has read the passages.
        passages: token ids [1, T].
        states: for each passage, the runtime's outputs of all stages.

    Returns:
        Index of the layer with the largest ratio, and that ratio.

    Raises:
        DiffQuantError: the reference has no quantized cache.
    """
    given = reference.cache
    if given is None:
        raise DiffQuantError("the model has no quantized cache to measure")
    # Neither the embedding nor the head has a cache.
    layers = range(1, reference.layers + 1)
    with reference.simulate_cache(None):
        wanted = _compute_wanted(reference, passages, states, numbers=layers)
    typical = []
    for cache in (given, given.with_fitted_scales()):
        with reference.simulate_cache(cache):
            rounded = _outputs(_compute_wanted(reference, passages, states, numbers=layers))
        typical.append(_compare(rounded, wanted).quantile(0.5))
    ratios = np.array([rounded / max(fitted, 1e-30) for rounded, fitted in zip(*typical, strict=True)])
    # NumPy's argmax returns the first NaN if there is one.
    layer = int(ratios.argmax())
    return layer, float(ratios[layer])


def position_errors(got: Tensor, wanted: Tensor, before: Tensor) -> Tensor:
    """Return the RMS errors [B·T] of positions, relative to the RMS of what the stage should add to its input.

    Args:
        got: the stage's output [B, T, D].
        wanted: expected output [B, T, D].
        before: the stage's input [B, T, D].
    """
    return _rms(got - wanted) / _rms(wanted - before).clamp(min=1e-30)


def relative_rms(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the RMS error of logits, relative to the standard deviation of expected logits over the vocabulary.

    Args:
        pairs: for each passage, computed and expected logits [1, T, vocabulary].
    """
    difference = spread = 0.0
    for got, wanted in pairs:
        difference += float(_norm(got - wanted).double().square().sum())
        spread += float(_norm(wanted - wanted.mean(-1, keepdim=True)).double().square().sum())
    return math.sqrt(difference / max(spread, 1e-30))


# By passage and stage: the expected output, and what to subtract from it to find what the stage added.
_Wanted = list[list[tuple[Tensor, Tensor]]]


def _compute_wanted(
    reference: Reference,
    passages: Sequence[np.ndarray],
    states: Sequence[Sequence[Tensor]],
    firsts: Sequence[int] = (),
    numbers: Iterable[int] | None = None,
) -> _Wanted:
    """Compute each stage of the reference from the runtime's output of the stage before.

    Args:
        firsts: first position to compute of each passage; 0 by default.
        numbers: stages to compute; all by default.
    """
    firsts, last = firsts or [0] * len(passages), len(states[0]) - 1
    if not reference.packs and len(passages) > 1:
        ones = [slice(number, number + 1) for number in range(len(passages))]
        return [_compute_wanted(reference, passages[i], states[i], firsts[i], numbers)[0] for i in ones]
    found: _Wanted = [[] for _ in passages]
    for number in range(last + 1) if numbers is None else numbers:
        given = [outputs[number - 1] for outputs in states] if number else list(map(torch.from_numpy, passages))
        outputs = reference.compute_stage(number, given, firsts)
        for of_passage, x, wanted, first in zip(found, given, outputs, firsts, strict=True):
            if number == 0:
                of_passage.append((wanted, torch.zeros_like(wanted)))
            else:
                of_passage.append((wanted, wanted.mean(-1, keepdim=True) if number == last else x[:, first:]))
    return found


def _outputs(wanted: _Wanted) -> list[list[Tensor]]:
    return [[output for output, _ in stages] for stages in wanted]


def _compare(got: Sequence[Sequence[Tensor]], wanted: _Wanted) -> StageErrors:
    """Compute the errors of outputs by passage and stage."""
    return StageErrors(
        tuple(
            tuple(position_errors(x, *pair) for x, pair in zip(outputs, pairs, strict=True))
            for outputs, pairs in zip(got, wanted, strict=True)
        )
    )


def _rms(x: Tensor) -> Tensor:
    return (_norm(x) / math.sqrt(x.shape[-1])).flatten()


def _norm(x: Tensor) -> Tensor:
    """Return the L2 norm of x along its last axis, in float32: float64 takes twenty times as long."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return length
