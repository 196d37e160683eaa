"""Sessions and routes: the ways to open an exported folder, and the ways to feed a sequence to it.

The routes are prefill in one call, a padded batch, chunked prefill, decoding one sequence, decoding a batch, and
decoding in place. All must give the same results as prefill.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from onnxruntime.capi import onnxruntime_pybind11_state as runtime_errors
from torch import Tensor

from diffquant.onnx.native import library_path
from diffquant.onnx.runtime.session import GraphError, InPlaceDecoder, OnnxModel
from diffquant.onnx.verification.errors import relative_rms
from diffquant.onnx.verification.reference import Reference

# Opening a session raises the runtime's own exception types.
_RUNTIME_ERRORS = (GraphError, runtime_errors.InvalidArgument, runtime_errors.Fail, runtime_errors.NotImplemented)


@dataclass(frozen=True)
class SessionSettings:
    """A way to open an exported folder in ONNX Runtime, so that it returns the output of every stage.

    Attributes:
        name: name in reports.
        rounds: whether matmuls round activations to int8.
        accuracy_level: accuracy level of every quantized matmul, or None to use the folder's.
        runs_body: whether attention runs its function body although there is a native kernel.
        is_as_exported: whether the session computes the same as the unchanged folder.
    """

    name: str
    rounds: bool
    accuracy_level: int | None = None
    runs_body: bool = False
    is_as_exported: bool = False

    def open(self, folder: Path, threads: int, extra_outputs: Sequence[str], device: str) -> OnnxModel:
        """Open the folder; `extra_outputs` are the names of values in the graph to add to the outputs."""
        return OnnxModel(
            folder,
            threads,
            tuple(extra_outputs),
            every_position=True,
            accuracy_level=self.accuracy_level,
            native=not self.runs_body,
            device=device,
            spins=False,
        )

    @contextmanager
    def explain_errors(self, route: str) -> Iterator[None]:
        """Inside the context, convert an error of the runtime into one that names this session and the route."""
        try:
            yield
        except _RUNTIME_ERRORS as error:
            raise GraphError(f"{self.name}, {route}: does not run ({error})") from error


def list_sessions(reference: Reference, rounds: bool, device: str) -> list[SessionSettings]:
    """Return the sessions in which to verify a folder.

    The first session opens the unchanged folder. If the folder rounds activations, another one has float32 matmuls. If
    there is a native attention kernel for the device, another one runs without it.

    Args:
        rounds: whether the folder's matmuls round activations to int8.
        device: where ONNX Runtime computes: "cpu" or "cuda:N".
    """
    sessions = [SessionSettings("int8 activations" if rounds else "as exported", rounds, is_as_exported=True)]
    if rounds:
        # Shows errors that rounding would hide: this session differs from torch only by float32 arithmetic.
        sessions.append(SessionSettings("float32 products", False, 1))
    # ONNX Runtime computes a Transformer's attention over a float cache in both sessions.
    has_kernel = reference.model.config.diff_spec.maps > 1 or reference.cache is not None
    if library_path() is not None and device == "cpu" and has_kernel:
        sessions.append(SessionSettings("function body", False, 1 if rounds else None, runs_body=True))
    return sessions


# Runs passages [1, T] and returns a Run of each; a route may skip later passages.
Runner = Callable[[OnnxModel, Sequence[np.ndarray], tuple[str, ...]], list["Run"]]

PREFILL, IN_PLACE = "prefill", "decode in place"
_DECODED, _DECODED_TOGETHER = 5, 3


@dataclass(frozen=True)
class Run:
    """Outputs of one passage's run.

    Attributes:
        states: requested values of the graph at every position, [1, T, ...] each; the last are the logits.
        calls: number of tokens in each call.
        first: first position to compare, which is the first that was computed behind a cache; 0 if none was.
    """

    states: list[np.ndarray]
    calls: tuple[int, ...]
    first: int = 0

    def cut_to(self, length: int) -> "Run":
        """Return this run, which must have one call, cut to its first `length` positions."""
        return Run([values[:, :length] for values in self.states], (length,))

    @property
    def tensors(self) -> list[Tensor]:
        """`states` as float32 tensors."""
        return list(map(as_float32, self.states))


def pair_logits(wanted: Sequence[Tensor], got: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of expected and computed logits [1, T, vocabulary], one pair for each passage of `got`.

    Args:
        wanted: expected logits of each passage, cut to the length of the computed ones.
        got: computed logits of the first passages, or of all.
    """
    return ((whole[:, : some.shape[1]], some) for whole, some in zip(wanted, got, strict=False))


def relative_error(runs: Sequence[Run], wanted: Sequence[Tensor]) -> float:
    """Return the relative RMS error of the logits of some runs, from each run's `first` position on.

    Args:
        wanted: expected logits [1, T, vocabulary] of each passage.
    """
    return relative_rms(
        (got[:, run.first :], logits[:, run.first :])
        for run, (logits, got) in zip(runs, pair_logits(wanted, [run.tensors[-1] for run in runs]), strict=True)
    )


def as_float32(values: np.ndarray) -> Tensor:
    """Convert an array from ONNX Runtime to a float32 tensor."""
    return torch.from_numpy(values.astype(np.float32, copy=False))


def iterate_routes(model: OnnxModel, shares_prefixes: bool = True) -> Iterator[tuple[str, Runner]]:
    """Yield the name and the runner of each route except prefill; the runners must be called in this order.

    Args:
        shares_prefixes: whether a position's result does not depend on the number of later tokens in its call.
    """
    # "padded batch" and "batch decode" share one run: the first is its prefill, the second continues it.
    decoded: list[Run] = []
    is_one = shares_prefixes and model.cache is not None
    yield "padded batch", partial(_run_padded_before, decoded) if is_one else partial(_run_padded_then_decode, most=0)
    if model.cache is not None:
        yield "chunked prefill", _run_in_chunks
        yield "decode", _run_decode
        yield "batch decode", (lambda *_: decoded) if shares_prefixes else _run_padded_then_decode


def run_last_positions(model: OnnxModel, passages: Sequence[np.ndarray]) -> list[Run]:
    """Run passages as an unchanged folder does, and return the logits of each call's last position; others are NaN.

    The first passage is decoded in place as `diffquant run` does: past and present caches share their memory. The
    others run as one padded batch, and end at different columns.
    """
    runs = [_decode_in_place(model, passages[0])]
    if len(passages) > 1:
        padded, mask, firsts = _pad_both_ways(passages[1:])
        (logits,), _ = model.run(padded, mask, model.allocate_cache(len(padded)))
        for of, ids, first in zip(logits, passages[1:], firsts, strict=True):
            length = ids.shape[1]
            last = of[[first + length - 1 if model.gives_every_position else 0]]
            runs.append(Run([_at_the_end(last, length)], (length,), length - 1))
    return runs


def _decode_in_place(model: OnnxModel, passage: np.ndarray) -> Run:
    state = InPlaceDecoder(model, 1, passage.shape[1])
    lengths = _prompt_then_tokens(passage.shape[1])
    last = np.concatenate([state.step(chunk)[0, -1:] for chunk in np.split(passage, _ends(lengths), 1)])
    return Run([_at_the_end(last, passage.shape[1])], tuple(lengths), lengths[0] - 1)


def _at_the_end(logits: np.ndarray, length: int) -> np.ndarray:
    """Return logits [1, T, V] whose last n positions are the given [n, V]; the others are NaN and not compared."""
    return np.pad(logits, ((length - len(logits), 0), (0, 0)), constant_values=np.nan)[None]


def prefill(model: OnnxModel, passages: Sequence[np.ndarray], outputs: tuple[str, ...]) -> list[Run]:
    """Run each passage as one call with batch size 1.

    Args:
        outputs: names of the graph's values to return.
    """
    return [_in_chunks(model, ids, [ids.shape[1]], outputs) for ids in passages]


def _run_in_chunks(model: OnnxModel, passages: Sequence[np.ndarray], outputs: tuple[str, ...]) -> list[Run]:
    return [_in_chunks(model, ids, _halves(ids.shape[1]), outputs) for ids in passages]


def _run_decode(model: OnnxModel, passages: Sequence[np.ndarray], outputs: tuple[str, ...]) -> list[Run]:
    """Decode only the longest passage, since one token per call is slow."""
    return [_in_chunks(model, passages[0], _prompt_then_tokens(passages[0].shape[1]), outputs)]


def _in_chunks(model: OnnxModel, ids: np.ndarray, lengths: list[int], outputs: tuple[str, ...]) -> Run:
    cache, end, parts = model.allocate_cache(1), 0, []
    for chunk in np.split(ids, _ends(lengths), 1):
        end += chunk.shape[1]
        states, cache = model.run(chunk, np.ones((1, end), np.int64), cache, outputs)
        parts.append(states)
    states = [np.concatenate(values, 1) for values in zip(*parts, strict=True)] if len(parts) > 1 else parts[0]
    return Run(states, tuple(lengths), lengths[0] if len(lengths) > 1 else 0)


def _run_padded_before(
    decoded: list[Run], model: OnnxModel, passages: Sequence[np.ndarray], outputs: tuple[str, ...]
) -> list[Run]:
    """Run a padded batch and then decode; return the prefill's part, and put the whole runs into `decoded`."""
    decoded[:] = _run_padded_then_decode(model, passages, outputs)
    return [Run([values[:, : run.calls[0]] for values in run.states], run.calls[:1]) for run in decoded]


def _run_padded_then_decode(
    model: OnnxModel, passages: Sequence[np.ndarray], outputs: tuple[str, ...], most: int = _DECODED_TOGETHER
) -> list[Run]:
    """Prefill a padded batch without the last tokens of each passage, then decode these for all passages together.

    Args:
        most: number of these tokens, if each passage has as many besides its first.
    """
    steps = min(most, min(ids.shape[1] for ids in passages) - 1)
    read = [ids[:, : ids.shape[1] - steps] for ids in passages]
    padded, mask, firsts = _pad_both_ways(read)
    states, cache = model.run(padded, mask, model.allocate_cache(len(passages)), outputs)
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
    """Pad passages alternately on the right and on the left; return ids and mask [B, T] and each first column."""
    longest = max(ids.shape[1] for ids in passages)
    firsts = [(longest - ids.shape[1]) * (number % 2) for number, ids in enumerate(passages)]
    padded, mask = np.zeros((2, len(passages), longest), np.int64)
    for number, (ids, first) in enumerate(zip(passages, firsts, strict=True)):
        columns = slice(first, first + ids.shape[1])
        padded[number, columns], mask[number, columns] = ids[0], 1
    return padded, mask, firsts


def _of_sequence(states: Sequence[np.ndarray], number: int, first: int, length: int) -> list[np.ndarray]:
    """Cut one sequence out of a padded batch's values.

    Inside the graph its tokens are moved before its padding; its logits are at the caller's columns.
    """
    *inside, logits = states
    return [*(x[number : number + 1, :length] for x in inside), logits[number : number + 1, first : first + length]]


def _halves(length: int) -> list[int]:
    return [length // 2, length - length // 2] if length > 1 else [length]


def _prompt_then_tokens(length: int) -> list[int]:
    decoded = min(_DECODED, length - 1)
    return [length - decoded] + [1] * decoded


def _ends(lengths: list[int]) -> np.ndarray:
    """Return the indices at which np.split cuts a sequence into parts of these lengths."""
    return np.cumsum(lengths)[:-1]
