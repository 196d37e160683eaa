"""Calls that reach far into the context without reading all of it: single tokens behind caches of random rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnxruntime as ort

from diffquant.export.runtime.interface import CacheShape
from diffquant.export.runtime.session import OnnxModel, bind_tokens
from diffquant.export.verification.reference import WHOLE, Reading, Reference

LONG_CONTEXT = "long context"
# Tokens that are read behind each past. The median over them does not notice a code that one of them flips.
TOKENS = 3
# Beyond the passages that are read whole; then come the powers of four.
_PASTS = (255, 300)
# Bytes of one layer's keys and values in float32, of which the reference holds three copies.
_MOST_BYTES = 2**28
# Positions that are read in one call where there is no cache to put before a token.
_MOST_UNCACHED = 1024


@dataclass(frozen=True)
class FarCalls:
    """Sequences that were read alike.

    Attributes:
        reading: how the reference has to read them.
        sequences: token ids [B, T], which are compared together.
        states: values of the graph of each of these, [B, T, ...] each.
    """

    reading: Reading
    sequences: list[np.ndarray]
    states: list[list[np.ndarray]]


def reach(model: OnnxModel, positions: int) -> int:
    """Number of a context's positions that `far_calls` reaches."""
    return min(positions, _most_rows(model.cache) + 1 if model.cache else _MOST_UNCACHED)


def far_calls(
    model: OnnxModel, reference: Reference, passages: Sequence[np.ndarray], outputs: tuple[str, ...]
) -> Iterator[FarCalls]:
    """Single tokens at the context's beginning, behind ever more rows, and at the end of what `reach` says.

    Without a cache, one sequence of that length takes the place of those behind rows.
    """
    text = np.concatenate(passages, 1)
    end = reach(model, reference.model.config.max_position_embeddings)
    tokens = text[0, np.linspace(0, text.shape[1] - 1, TOKENS, dtype=int)][:, None]
    yield FarCalls(WHOLE, [tokens], [_read(model, tokens, outputs)])
    if model.cache is None:
        whole = np.resize(text, (1, end))
        yield FarCalls(WHOLE, [whole], [_read(model, whole, outputs)])
        return
    sizes, states_after = _row_sizes(model, passages[-1])
    for length in past_lengths(end):
        drawn = [_random_rows(model.cache, length, size, seed) for seed, size in enumerate(sizes)]
        rows = reference.rows_of_a_cache(*drawn)
        keys, values = (part[:, :, :length] for part in rows)
        past = reference.past(keys, values, states_after)
        at_once = max(1, _MOST_BYTES // (past.nbytes + 1))
        batches = [tokens[at : at + at_once] for at in range(0, TOKENS, at_once)]
        behind = partial(_behind, model, rows, states_after, outputs)
        yield FarCalls(Reading(past=past), batches, [behind(batch) for batch in batches])


def past_lengths(end: int) -> list[int]:
    """Numbers of rows before a token, up to one less than the positions there are."""
    last = end - 1
    powers = (2**power - 1 for power in range(10, last.bit_length() + 1, 2))
    return sorted({length for length in (*_PASTS, *powers, last) if 0 < length <= last})


def _most_rows(cache: CacheShape) -> int:
    entries = cache.width * (2 if cache.dtype == np.uint8 else 1)
    return _MOST_BYTES // (2 * cache.kv_pairs * entries * np.float32().itemsize)


def _read(model: OnnxModel, ids: np.ndarray, outputs: tuple[str, ...]) -> list[np.ndarray]:
    states, _ = model.run(ids, np.ones_like(ids), model.empty_cache(len(ids)), outputs)
    return states


def _row_sizes(model: OnnxModel, passage: np.ndarray) -> tuple[list[float], list[np.ndarray]]:
    """RMS of a passage's keys and values, over all layers, and the states after it of the last layer that has some."""
    _, caches = model.run(passage, np.ones_like(passage), model.empty_cache(1))
    kept = 0 if model.cache is None else len(model.cache.inputs)
    rows, states = caches[:kept], caches[kept:]
    parts = [[np.square(value.numpy().astype(np.float64)).mean() for value in rows[part::2]] for part in (0, 1)]
    return [float(np.mean(part)) ** 0.5 for part in parts], [state.numpy() for state in states[-2:]]


def _random_rows(cache: CacheShape, length: int, size: float, seed: int) -> np.ndarray:
    """Rows [1, h_kv, length + 1, entries] with room for one: any codes, or normal floats of this RMS."""
    shape = (1, cache.kv_pairs, length + 1, cache.width)
    rng = np.random.default_rng([length, seed])
    if cache.dtype.kind == "f":
        return (rng.standard_normal(shape, np.float32) * np.float32(size)).astype(cache.dtype)
    return rng.integers(0, 256, shape, np.uint8).view(cache.dtype)


def _behind(
    model: OnnxModel,
    rows: Sequence[np.ndarray],
    kept: Sequence[np.ndarray],
    outputs: tuple[str, ...],
    tokens: np.ndarray,
) -> list[np.ndarray]:
    """States of tokens [B, 1], each behind the same rows, whose last one is the token's own, and the same kept states.

    All layers share one buffer of keys and one of values, which keeps the whole at the size of one layer: a layer's
    row is read before the next layer, which needs its output, writes another there.
    """
    if model.cache is None:
        return []
    count, length = len(tokens), rows[0].shape[2]
    buffers = [model.device.value(np.repeat(part, count, 0)) for part in rows]
    binding = model.session.io_binding()
    bind_tokens(binding, tokens, np.ones((count, length), np.int64))
    for name in outputs:
        binding.bind_output(name)
    for number, (past, present) in enumerate(zip(model.cache.inputs, model.cache.outputs, strict=True)):
        binding.bind_ortvalue_input(past, buffers[number % 2])
        binding.bind_ortvalue_output(present, buffers[number % 2])
    for number, state in enumerate(model.cache.states):
        binding.bind_ortvalue_input(state.input, model.device.value(np.repeat(kept[number % 2], count, 0)))
    model.run_bound(binding)
    results: list[ort.OrtValue] = binding.get_outputs()
    return [value.numpy() for value in results[: len(outputs)]]
