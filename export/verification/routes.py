"""The routes by which a sequence can go through an exported model; all must give what a whole sequence gives."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from diffquant.export.runtime.session import InPlaceDecoder, OnnxModel

# From passages [1, T] to a run of each; a route may leave out later passages.
Runner = Callable[[OnnxModel, Sequence[np.ndarray], tuple[str, ...]], list["Run"]]

PREFILL, IN_PLACE = "prefill", "decode in place"
_DECODED, _DECODED_TOGETHER = 5, 3


@dataclass(frozen=True)
class Run:
    """Results of one passage's run.

    Attributes:
        states: values of the graph at every position, [1, T, ...] each, as they were asked for.
        calls: numbers of tokens of the calls that read it.
        first: first position that tells this route from prefill: one that was read behind a cache, where there is one.
    """

    states: list[np.ndarray]
    calls: tuple[int, ...]
    first: int = 0

    @property
    def tensors(self) -> list[Tensor]:
        """The states in float32."""
        return list(map(as_float32, self.states))


def as_float32(values: np.ndarray) -> Tensor:
    """Values that ONNX Runtime gave, in float32."""
    return torch.from_numpy(values.astype(np.float32, copy=False))


def routes(model: OnnxModel, shares_prefixes: bool = True) -> Iterator[tuple[str, Runner]]:
    """Names and runners of the routes that a model has beside prefill, to be run in this order.

    Args:
        shares_prefixes: whether positions do not depend on how many follow them in a call.
    """
    # One batch is padded, read and decoded further: what it was before its first decoded token is a route by itself.
    decoded: list[Run] = []
    is_one = shares_prefixes and model.cache is not None
    yield "padded batch", partial(_padded_before, decoded) if is_one else _padded
    if model.cache is not None:
        yield "chunked prefill", _chunked
        yield "decode", _decoded
        yield "batch decode", (lambda *_: decoded) if shares_prefixes else _padded_then_decoded


def last_positions(model: OnnxModel, passages: Sequence[np.ndarray]) -> list[Run]:
    """Logits as a folder gives them that gives each sequence's last ones, of any model.

    The first passage is decoded as `diffquant run` does it, where past and present share their memory; the others are a
    padded batch, which ends at a place of its own in each.
    """
    runs = [_decoded_in_place(model, passages[0])]
    if len(passages) > 1:
        padded, mask, firsts = _pad_both_ways(passages[1:])
        (logits,), _ = model.run(padded, mask, model.empty_cache(len(padded)))
        for of, ids, first in zip(logits, passages[1:], firsts, strict=True):
            length = ids.shape[1]
            last = of[[first + length - 1 if model.gives_every_position else 0]]
            runs.append(Run([_at_the_end(last, length)], (length,), length - 1))
    return runs


def _decoded_in_place(model: OnnxModel, passage: np.ndarray) -> Run:
    state = InPlaceDecoder(model, 1, passage.shape[1])
    lengths = _prompt_then_tokens(passage.shape[1])
    last = np.concatenate([state.step(chunk)[0, -1:] for chunk in np.split(passage, _ends(lengths), 1)])
    return Run([_at_the_end(last, passage.shape[1])], tuple(lengths), lengths[0] - 1)


def _at_the_end(logits: np.ndarray, length: int) -> np.ndarray:
    """Logits [1, T, V] that end with these [n, V]; the others are not there to be compared."""
    return np.pad(logits, ((length - len(logits), 0), (0, 0)), constant_values=np.nan)[None]


def prefill(model: OnnxModel, passages: Sequence[np.ndarray], outputs: tuple[str, ...]) -> list[Run]:
    """Runs of each passage by itself, in one call."""
    return [_in_chunks(model, ids, [ids.shape[1]], outputs) for ids in passages]


def _chunked(model: OnnxModel, passages: Sequence[np.ndarray], outputs: tuple[str, ...]) -> list[Run]:
    return [_in_chunks(model, ids, _halves(ids.shape[1]), outputs) for ids in passages]


def _decoded(model: OnnxModel, passages: Sequence[np.ndarray], outputs: tuple[str, ...]) -> list[Run]:
    """The longest passage alone: a token at a time is slow."""
    return [_in_chunks(model, passages[0], _prompt_then_tokens(passages[0].shape[1]), outputs)]


def _in_chunks(model: OnnxModel, ids: np.ndarray, lengths: list[int], outputs: tuple[str, ...]) -> Run:
    cache, end, parts = model.empty_cache(1), 0, []
    for chunk in np.split(ids, _ends(lengths), 1):
        end += chunk.shape[1]
        states, cache = model.run(chunk, np.ones((1, end), np.int64), cache, outputs)
        parts.append(states)
    states = [np.concatenate(values, 1) for values in zip(*parts, strict=True)] if len(parts) > 1 else parts[0]
    return Run(states, tuple(lengths), lengths[0] if len(lengths) > 1 else 0)


def _padded(model: OnnxModel, passages: Sequence[np.ndarray], outputs: tuple[str, ...]) -> list[Run]:
    padded, mask, firsts = _pad_both_ways(passages)
    states, _ = model.run(padded, mask, model.empty_cache(len(passages)), outputs)
    lengths = [ids.shape[1] for ids in passages]
    return [
        Run(_of_sequence(states, i, first, length), (length,))
        for i, (first, length) in enumerate(zip(firsts, lengths, strict=True))
    ]


def _padded_before(
    decoded: list[Run], model: OnnxModel, passages: Sequence[np.ndarray], outputs: tuple[str, ...]
) -> list[Run]:
    """A padded batch up to the tokens that are then decoded; the whole runs go to `decoded`."""
    decoded[:] = _padded_then_decoded(model, passages, outputs)
    return [Run([values[:, : run.calls[0]] for values in run.states], run.calls[:1]) for run in decoded]


def _padded_then_decoded(model: OnnxModel, passages: Sequence[np.ndarray], outputs: tuple[str, ...]) -> list[Run]:
    """States of a padded batch, but for the last tokens of each passage, which are decoded together."""
    steps = min(_DECODED_TOGETHER, min(ids.shape[1] for ids in passages) - 1)
    read = [ids[:, : ids.shape[1] - steps] for ids in passages]
    padded, mask, firsts = _pad_both_ways(read)
    states, cache = model.run(padded, mask, model.empty_cache(len(passages)), outputs)
    parts = [[_of_sequence(states, i, firsts[i], ids.shape[1])] for i, ids in enumerate(read)]
    for step in range(steps):
        mask = np.pad(mask, ((0, 0), (0, 1)), constant_values=1)
        tokens = np.concatenate([ids[:, ids.shape[1] - steps + step][:, None] for ids in passages])
        states, cache = model.run(tokens, mask, cache, outputs)
        for i, part in enumerate(parts):
            part.append([values[i : i + 1] for values in states])
    return [
        Run(
            [np.concatenate(values, 1) for values in zip(*part, strict=True)],
            (ids.shape[1], *[1] * steps),
            ids.shape[1] if steps else 0,
        )
        for ids, part in zip(read, parts, strict=True)
    ]


def _pad_both_ways(passages: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Ids and mask [B, T] of passages padded on the right and on the left in turns, and their first columns."""
    longest = max(ids.shape[1] for ids in passages)
    firsts = [(longest - ids.shape[1]) * (number % 2) for number, ids in enumerate(passages)]
    padded, mask = np.zeros((2, len(passages), longest), np.int64)
    for number, (ids, first) in enumerate(zip(passages, firsts, strict=True)):
        columns = slice(first, first + ids.shape[1])
        padded[number, columns], mask[number, columns] = ids[0], 1
    return padded, mask, firsts


def _of_sequence(states: Sequence[np.ndarray], number: int, first: int, length: int) -> list[np.ndarray]:
    """Values of one sequence of a padded batch: in the graph its tokens come first, its logits stay in place."""
    *inside, logits = states
    return [*(x[number : number + 1, :length] for x in inside), logits[number : number + 1, first : first + length]]


def _halves(length: int) -> list[int]:
    return [length // 2, length - length // 2] if length > 1 else [length]


def _prompt_then_tokens(length: int) -> list[int]:
    decoded = min(_DECODED, length - 1)
    return [length - decoded] + [1] * decoded


def _ends(lengths: list[int]) -> np.ndarray:
    """Where to cut a sequence into parts of these lengths."""
    return np.cumsum(lengths)[:-1]
