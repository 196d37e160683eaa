"""Decoding with CUDA graphs: the kernels of a decoding step are recorded once, then launched together.

Launched one by one, they take the host longer than the GPU needs to run them, which hides the speed of low bits.
"""

import logging
from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor, nn

from diffquant.family.mask import Mask
from diffquant.kernels.cache.kv_store import KVStore
from diffquant.model.fused_cache import FusedCache

_log = logging.getLogger(__name__)

Step = Callable[[Tensor, Tensor, Mask], Tensor]


# A function that replays recorded kernels, and the tensor that each replay writes. The tensors that the kernels read
# must stay alive.
Recording = tuple[Callable[[], None], Tensor]


def record_cuda_graph(work: Callable[[], Tensor], device: torch.device) -> Recording:
    """Record the kernels that `work` launches on a device into a CUDA graph, without running them.

    Returns:
        A function that replays the kernels, and the tensor returned by `work`, to which each replay writes.

    Raises:
        RuntimeError: `work` synchronizes with the device, or does something else that cannot be recorded.
    """
    graph = torch.cuda.CUDAGraph()
    random = torch.cuda.default_generators[device.index]
    before = random.clone_state()
    try:
        # By default torch captures a stream of the current device; work on another device would then run immediately
        # and the graph would be empty. "thread_local" lets other threads keep using the device.
        with (
            torch.cuda.device(device),
            torch.cuda.graph(graph, stream=torch.cuda.Stream(device), capture_error_mode="thread_local"),
        ):
            result = work()
    except RuntimeError:
        # After a failed recording the random generator still counts as being captured, and sampling would fail.
        random.graphsafe_set_state(before)
        raise
    return graph.replay, result


# A recorded step and its inputs: embedded tokens [B, 1, D], positions [B or 1, 1] and the mask.
_RecordedStep = tuple[Recording, Tensor, Tensor, Mask]


class GraphedSteps:
    """Recorder of decoding steps of one token, for one call of `generate` at a time.

    A graph contains memory addresses, so a step is recorded only if the cache has not moved since the step before. The
    first step, and those during which the cache grows or its sequences are reordered, run without a graph. These steps
    also compile and load the kernels, which is not possible while recording. A later call whose cache has the same
    shape may reuse the memory of the cache, and then the recording too.
    """

    def __init__(self) -> None:
        self._cache: FusedCache | None = None
        self._place: tuple[object, ...] | None = None
        self._recorded: _RecordedStep | None = None
        self._has_failed = False
        self._signature: tuple[object, ...] | None = None

    def __reduce__(self) -> tuple[type["GraphedSteps"], tuple[()]]:
        # Copies of a model start without a recording.
        return GraphedSteps, ()

    def remember_model(self, model: nn.Module) -> bool:
        """Remember the model for `is_model_unchanged`. Return whether a step is recorded, for a later call to reuse."""
        self._signature = signature_of(model)
        return self._recorded is not None

    def is_model_unchanged(self, model: nn.Module) -> bool:
        """Return whether the model has not changed since `remember_model`."""
        return self._signature == signature_of(model)

    def reuse_store(self, layer: int, fits: Callable[[KVStore], bool]) -> KVStore | None:
        """Empty a layer's store of the previous call and return it.

        If there is none, or `fits` is false for it, release all stores of that call and the recording, and return None.
        """
        store: KVStore | None = None if self._cache is None else self._cache.layers[layer].store
        if store is None or not fits(store):
            self._cache = self._place = self._recorded = None
            return None
        store.clear()
        return store

    def run(
        self, step: Step, cache: FusedCache, x: Tensor, positions: Tensor, attention_mask: Tensor | None
    ) -> Tensor | None:
        """Compute hidden states of one more token per sequence by a graph, which is recorded if there is none yet.

        Args:
            step: function of x, positions and mask that appends to the cache and returns hidden states.
            cache: cache of earlier tokens.
            x: embedded tokens [B, 1, D].
            positions: positions of these tokens [B or 1, 1].
            attention_mask: [B, S] over cached and new tokens, 0 at padding; tokens after the first step must not be
                padding. Not needed without padding.

        Returns:
            Hidden states [B, 1, D], overwritten by the next call. None, with nothing done, if the step has to run
            without a graph.
        """
        versions, past = cache.storage_versions, cache.get_seq_length()
        if self._has_failed or versions is None or past >= cache.capacity:
            self._recorded = None
            return None
        place = (versions, x.shape, x.dtype, x.device, positions.shape, attention_mask is None)
        if place != self._place:
            self._cache, self._place, self._recorded = cache, place, None
            return None
        if cache is not self._cache:
            # Equal versions mean the same memory, so another call reuses it; its padding may differ.
            self._cache = cache
            if self._recorded is not None and not _has_changed(self._recorded[3], attention_mask, cache.capacity):
                self._fail(_HOLES)
                return None
        if self._recorded is None:
            mask = _lasting_mask(attention_mask, cache.capacity)
            self._recorded = self._record(step, cache, x, positions, mask)
            if self._recorded is None:
                return None
        (replay, result), recorded_x, recorded_positions, _ = self._recorded
        recorded_x.copy_(x)
        recorded_positions.copy_(positions)
        replay()
        cache.set_length(past + 1)
        return result

    def _record(self, step: Step, cache: FusedCache, x: Tensor, positions: Tensor, mask: Mask) -> _RecordedStep | None:
        past = cache.get_seq_length()
        if mask.keys is not None and mask.valid_ranges is None:
            self._fail(_HOLES)
            return None
        x, positions = x.clone(), positions.clone()
        try:
            recording = record_cuda_graph(lambda: step(x, positions, mask), x.device)
        except RuntimeError as error:
            self._fail(f"recording failed: {error}".splitlines()[0])
            return None
        finally:
            # The step advanced the count, but recorded kernels did not run.
            cache.set_length(past)
        return recording, x, positions, mask

    def _fail(self, reason: str) -> None:
        self._has_failed = True
        warn_of_ungraphed_decoding(reason)


_HOLES = "the padding mask has holes, which the decode kernel does not support"


def signature_of(model: nn.Module) -> tuple[object, ...]:
    """Return what a recorded step depends on in a model, except tensor values; equal signatures mean no change."""
    values = (value for module in model.modules() for value in (module, *vars(module).values()))
    return (torch.is_autocast_enabled("cuda"), *(part for value in values for part in _parts(value)))


def _parts(value: object) -> Iterator[object]:
    if isinstance(value, Tensor):
        yield from (value.data_ptr(), value.dtype, value.shape, value.stride())
    elif isinstance(value, dict):
        for name, each in value.items():
            yield name
            yield from _parts(each)
    else:
        yield value if value is None or isinstance(value, bool | int | float | str) else id(value)


@cache
def warn_of_ungraphed_decoding(reason: str) -> None:
    """Log once per reason that decoding on a CUDA device does not use CUDA graphs."""
    _log.warning("decoding does not use CUDA graphs, which makes it slower: %s", reason)


def _lasting_mask(attention_mask: Tensor | None, capacity: int) -> Mask:
    """Return a mask for this and all later steps, over the full capacity of the cache."""
    if attention_mask is None:
        return Mask()
    valid = attention_mask.new_ones(len(attention_mask), capacity, dtype=torch.bool)
    valid[:, : attention_mask.shape[1]] = attention_mask.bool()
    mask = Mask(valid)
    # Computed now, since it synchronizes with the device, which is not possible while recording.
    _ = mask.valid_ranges
    return mask


def _has_changed(recorded: Mask, attention_mask: Tensor | None, capacity: int) -> bool:
    """Overwrite a recorded mask in place with another call's mask; return whether that was possible."""
    if attention_mask is None or recorded.valid_ranges is None:
        return True
    mask = _lasting_mask(attention_mask, capacity)
    if mask.keys is None or recorded.keys is None or mask.valid_ranges is None:
        return False
    for old, new in zip((recorded.keys, *recorded.valid_ranges), (mask.keys, *mask.valid_ranges), strict=True):
        old.copy_(new)
    return True
