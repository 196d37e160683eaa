"""Test sequences of a verification: passages of the bundled text, and tokens at far positions of the context.

Far positions are tested with single tokens behind a cache of random keys and values, without a prefill that long.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import onnxruntime as ort

from diffquant.checkpoints.source import Source
from diffquant.data import books_text
from diffquant.errors import CheckpointError
from diffquant.model.config import DiffTransformerConfig
from diffquant.onnx.runtime.interface import CacheShape
from diffquant.onnx.runtime.session import OnnxModel, bind_tokens
from diffquant.onnx.verification.caches import WHOLE, CallPattern
from diffquant.onnx.verification.reference import Reference

POSITIONS = 512
LONGEST = 160
# Number of the longest passage's first positions on which routes are compared that differ in masks and caches.
BEGINNING = 48
# Passages differ in length, so that a padded batch has padding; the first is the longest.
_SHARES = (1.0, 0.8, 0.65, 0.5, 0.35, 0.9)
_SHORTEST = 2
# No tokenizer has more characters per token on average.
_CHARACTERS = 12

FarCalls = tuple[CallPattern, list[np.ndarray], list[list[np.ndarray]]]


def sample_passages(source: Source, config: DiffTransformerConfig) -> list[np.ndarray]:
    """Return passages of bundled text as token ids [1, T], at least `POSITIONS` tokens in total.

    If the checkpoint has no tokenizer, the tokens are random.

    Args:
        source: checkpoint whose tokenizer is used.
        config: configuration with the context length and the vocabulary size.
    """
    lengths = _lengths(max(1, min(LONGEST, config.max_position_embeddings - 1)))
    passages = _prose(source, lengths)
    if passages is None or max(map(max, passages)) >= config.vocab_size:
        rng = np.random.default_rng(0)
        passages = [rng.integers(0, config.vocab_size, length).tolist() for length in lengths]
    return [np.array([ids], np.int64) for ids in passages]


def cut_beginnings(passages: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Cut each passage [1, T] to its first tokens, a fraction `BEGINNING` / `LONGEST` of all."""
    return [ids[:, : max(min(_SHORTEST, ids.shape[1]), ids.shape[1] * BEGINNING // LONGEST)] for ids in passages]


def _lengths(longest: int) -> list[int]:
    lengths: list[int] = []
    while sum(lengths) < POSITIONS:
        share = _SHARES[len(lengths) % len(_SHARES)]
        lengths.append(max(min(_SHORTEST, longest), round(longest * share)))
    return lengths


def _prose(source: Source, lengths: list[int]) -> list[list[int]] | None:
    """Return equally spaced passages of the bundled text, or None if there is no tokenizer or too few tokens."""
    try:
        tokenizer = source.tokenizer
    except CheckpointError:
        return None
    text = books_text()
    passages = []
    for number, length in enumerate(lengths):
        start = number * len(text) // len(lengths)
        ids = tokenizer(text[start : start + _CHARACTERS * length])["input_ids"][:length]
        if len(ids) < length:
            return None
        passages.append(list(ids))
    return passages


LONG_CONTEXT = "long context"
# Tokens read behind each past. A code that flips for one of them does not change the median over them.
TOKENS = 3
# Past lengths beyond the whole passages; powers of 16 follow.
_PASTS = (255, 300)
# Largest size of one layer's float32 keys and values, in bytes; the reference holds three copies.
_MOST_BYTES = 2**28
# Largest number of positions read in one call by a model without a cache.
_MOST_UNCACHED = 1024


def count_reached_positions(model: OnnxModel, positions: int) -> int:
    """Return the number of positions that `run_far_tokens` reaches.

    Args:
        positions: number of positions of the model's context.
    """
    return min(positions, _most_rows(model.cache) + 1 if model.cache else _MOST_UNCACHED)


def run_far_tokens(
    model: OnnxModel, reference: Reference, passages: Sequence[np.ndarray], outputs: tuple[str, ...]
) -> Iterator[FarCalls]:
    """Run single tokens at position 0 and behind random caches of growing length, and yield their outputs.

    The longest cache fills the context, or as much of it as memory allows. A model without a cache runs one long
    sequence instead.

    Args:
        model: exported model to run.
        reference: torch reference, for its cache layout.
        passages: token ids [1, T] to take tokens from.
        outputs: names of the graph's values to return.

    Yields:
        For each group of calls to compare together: the reference's `CallPattern`, each call's token ids [B, T], and
        each call's outputs [B, T, ...].
    """
    text = np.concatenate(passages, 1)
    end = count_reached_positions(model, reference.model.config.max_position_embeddings)
    tokens = text[0, np.linspace(0, text.shape[1] - 1, TOKENS, dtype=int)][:, None]
    yield WHOLE, [tokens], [_read(model, tokens, outputs)]
    if model.cache is None:
        whole = np.resize(text, (1, end))
        yield WHOLE, [whole], [_read(model, whole, outputs)]
        return
    sizes, states_after = _row_sizes(model, passages[-1])
    for length in list_past_lengths(end):
        drawn = [_random_rows(model.cache, length, size, seed) for seed, size in enumerate(sizes)]
        rows = reference.adapt_random_cache(*drawn)
        keys, values = (part[:, :, :length] for part in rows)
        past = reference.convert_past(keys, values, states_after)
        at_once = max(1, _MOST_BYTES // (past.nbytes + 1))
        batches = [tokens[at : at + at_once] for at in range(0, TOKENS, at_once)]
        behind = partial(_behind, model, rows, states_after, outputs)
        yield CallPattern(past=past), batches, [behind(batch) for batch in batches]


def list_past_lengths(end: int) -> list[int]:
    """Return the cache lengths to test, in tokens, ascending.

    Args:
        end: number of positions that can be tested; the longest cache has `end` - 1 tokens.
    """
    last = end - 1
    powers = (2**power - 1 for power in range(10, last.bit_length() + 1, 4))
    return sorted({length for length in (*_PASTS, *powers, last) if 0 < length <= last})


def _most_rows(cache: CacheShape) -> int:
    entries = cache.width * (2 if cache.dtype == np.uint8 else 1)
    return _MOST_BYTES // (2 * cache.kv_pairs * entries * np.float32().itemsize)


def _read(model: OnnxModel, ids: np.ndarray, outputs: tuple[str, ...]) -> list[np.ndarray]:
    states, _ = model.run(ids, np.ones_like(ids), model.allocate_cache(len(ids)), outputs)
    return states


def _row_sizes(model: OnnxModel, passage: np.ndarray) -> tuple[list[float], list[np.ndarray]]:
    """Return the RMS of a passage's keys and of its values over all layers, and its final recurrent states.

    The states are those of the last layer that has some.
    """
    _, caches = model.run(passage, np.ones_like(passage), model.allocate_cache(1))
    kept = 0 if model.cache is None else len(model.cache.inputs)
    rows, states = caches[:kept], caches[kept:]
    parts = [[np.square(value.numpy().astype(np.float64)).mean() for value in rows[part::2]] for part in (0, 1)]
    return [float(np.mean(part)) ** 0.5 for part in parts], [state.numpy() for state in states[-2:]]


def _random_rows(cache: CacheShape, length: int, size: float, seed: int) -> np.ndarray:
    """Return random cache rows [1, h_kv, length + 1, entries]: uniform codes, or normal floats with RMS `size`.

    The last row is space for the new token.
    """
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
    """Run tokens [B, 1], each behind the same cached rows and recurrent states, and return the graph's outputs.

    The last cached row is space for the new token. All layers share one buffer of keys and one of values, so memory is
    that of one layer: a layer reads its row before the next layer, which needs its output, overwrites it.
    """
    if model.cache is None:
        return []
    count, length = len(tokens), rows[0].shape[2]
    buffers = [model.device.copy_to_device(np.repeat(part, count, 0)) for part in rows]
    binding = model.session.io_binding()
    bind_tokens(binding, tokens, np.ones((count, length), np.int64))
    for name in outputs:
        binding.bind_output(name)
    for number, (past, present) in enumerate(zip(model.cache.inputs, model.cache.outputs, strict=True)):
        binding.bind_ortvalue_input(past, buffers[number % 2])
        binding.bind_ortvalue_output(present, buffers[number % 2])
    for number, name in enumerate(model.cache.states):
        binding.bind_ortvalue_input(name, model.device.copy_to_device(np.repeat(kept[number % 2], count, 0)))
    model.run_bound(binding)
    results: list[ort.OrtValue] = binding.get_outputs()
    return [value.numpy() for value in results[: len(outputs)]]
