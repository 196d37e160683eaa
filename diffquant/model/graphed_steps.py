"""Decoding by replays of a CUDA graph: the kernels of one token's step, recorded once and launched as one.

Launching them one by one takes the host longer than they run, which hides all that low bits save.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from diffquant.family.mask import Mask
from diffquant.model.fused_cache import FusedCache

_log = logging.getLogger(__name__)

Step = Callable[[Tensor, Tensor, Mask], Tensor]


@dataclass(frozen=True)
class Recording:
    """Recorded work on a device, replayable at the same addresses.

    Attributes:
        replay: function that does it.
        result: tensor that each replay writes anew.
        work: what was recorded; a graph knows addresses alone, so what the work reads has to live as long.
    """

    replay: Callable[[], None]
    result: Tensor
    work: Callable[[], Tensor]


def record(work: Callable[[], Tensor], device: torch.device) -> Recording:
    """A CUDA graph of some work on one device, which does not run yet.

    Raises:
        RuntimeError: the work waits for the device, or does something else that no graph holds.
    """
    graph = torch.cuda.CUDAGraph()
    random = torch.cuda.default_generators[device.index]
    before = random.clone_state()
    try:
        # torch captures a stream of the current device unless told otherwise: on another device the work would run at
        # once, and the graph be empty. Other threads may go on with the device.
        with (
            torch.cuda.device(device),
            torch.cuda.graph(graph, stream=torch.cuda.Stream(device), capture_error_mode="thread_local"),
        ):
            result = work()
    except RuntimeError:
        # A recording that failed leaves the generator as if it still went on, and sampling would be refused.
        random.graphsafe_set_state(before)
        raise
    return Recording(graph.replay, result, work)


@dataclass(frozen=True)
class _RecordedStep:
    """A recorded step with the tensors that it reads: embedded tokens [B, 1, D] and positions [B or 1, 1]."""

    recording: Recording
    x: Tensor
    positions: Tensor


class GraphedSteps:
    """Steps of one token, of one call of `generate`: recorded once the cache stays in place, then replayed.

    The first step runs as it is, and so do those during which the cache grows or its sequences move, since a graph
    holds addresses. That step also compiles and loads the kernels, which cannot be done while recording.
    """

    def __init__(self) -> None:
        self._cache: FusedCache | None = None
        self._place: tuple[object, ...] | None = None
        self._recorded: _RecordedStep | None = None
        self._has_failed = False

    def run(
        self, step: Step, cache: FusedCache, x: Tensor, positions: Tensor, attention_mask: Tensor | None
    ) -> Tensor | None:
        """Hidden states [B, 1, D] of one more token of each sequence, valid until the next call.

        Args:
            step: function of x, positions and mask that appends to the cache and gives the states.
            cache: cache of the tokens before.
            x: embedded tokens [B, 1, D].
            positions: their positions [B or 1, 1].
            attention_mask: [B, S] over cached and new tokens, 0 where padding; no token after the first step is
                padding. Not needed without padding.

        Returns:
            States, or None, with nothing done, where the step has to run without a graph.
        """
        stamps, past = cache.stamps, cache.get_seq_length()
        if self._has_failed or stamps is None or past >= cache.capacity:
            self._recorded = None
            return None
        place = (stamps, x.shape, x.dtype, x.device, positions.shape, attention_mask is None)
        if cache is not self._cache or place != self._place:
            self._cache, self._place, self._recorded = cache, place, None
            return None
        if self._recorded is None:
            mask = _lasting_mask(attention_mask, cache.capacity)
            self._recorded = self._record(step, cache, x, positions, mask)
            if self._recorded is None:
                return None
        recorded = self._recorded
        recorded.x.copy_(x)
        recorded.positions.copy_(positions)
        recorded.recording.replay()
        cache.count(past + 1)
        return recorded.recording.result

    def _record(self, step: Step, cache: FusedCache, x: Tensor, positions: Tensor, mask: Mask) -> _RecordedStep | None:
        past = cache.get_seq_length()
        if mask.keys is not None and mask.ranges is None:
            self._fail("the padding mask has holes, which the decode kernel does not take")
            return None
        x, positions = x.clone(), positions.clone()
        try:
            recording = record(lambda: step(x, positions, mask), x.device)
        except RuntimeError as error:
            self._fail(f"recording failed: {error}".splitlines()[0])
            return None
        finally:
            # What was launched into the recording did not run.
            cache.count(past)
        return _RecordedStep(recording, x, positions)

    def _fail(self, reason: str) -> None:
        self._has_failed = True
        warn_of_ungraphed_decoding(reason)


@cache
def warn_of_ungraphed_decoding(reason: str) -> None:
    """Log once per reason that decoding on a CUDA device launches its kernels one by one."""
    _log.warning("decoding goes without CUDA graphs, which makes it slower: %s", reason)


def _lasting_mask(attention_mask: Tensor | None, capacity: int) -> Mask:
    """The mask of this and all later steps, over the full capacity of the cache."""
    if attention_mask is None:
        return Mask()
    valid = attention_mask.new_ones(len(attention_mask), capacity, dtype=torch.bool)
    valid[:, : attention_mask.shape[1]] = attention_mask.bool()
    mask = Mask(valid)
    # Looked up now: the answer comes from the device.
    _ = mask.ranges
    return mask
