"""An exported folder in ONNX Runtime against its reference in torch, stage by stage and route by route."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from onnxruntime.capi import onnxruntime_pybind11_state as runtime_errors
from torch import Tensor

from diffquant.errors import CheckpointError
from diffquant.evals.prefixes import shares_prefixes
from diffquant.export.graph.decoder import EMBEDDED, LAYER_OUTPUT
from diffquant.export.manifest import Manifest
from diffquant.export.runtime.device import on_cpu_text
from diffquant.export.runtime.session import GraphError, OnnxModel
from diffquant.export.verification.errors import StageNoise, cache_excess, relative_rms, stage_errors, stage_noise
from diffquant.export.verification.long_context import LONG_CONTEXT, FarCalls, far_calls, reach
from diffquant.export.verification.passages import beginnings
from diffquant.export.verification.reference import WHOLE, Reading, Reference
from diffquant.export.verification.report import (
    Measure,
    Route,
    SessionTokens,
    Verification,
    far_measures,
    loses_tokens,
    measures,
    nearest_limits,
)
from diffquant.export.verification.routes import IN_PLACE, PREFILL, Run, as_float32, last_positions, prefill, routes
from diffquant.export.verification.sessions import Session, sessions_of
from diffquant.export.verification.tokens import compare_tokens
from diffquant.recipe import Recipe
from diffquant.support.progress import Progress
from diffquant.support.spelling import spelled

# A session that cannot be made raises the runtime's own.
_RUNTIME_ERRORS = (GraphError, runtime_errors.InvalidArgument, runtime_errors.Fail, runtime_errors.NotImplemented)

# A difference may be this many times what rounding alone makes of the reference.
MARGIN = 4.0
# Typical rounding of the cache against that under scales fitted to the passages themselves: two bits lost.
CACHE_LIMIT = 4.0
# Work of a route, and of measuring what rounding does, beside that of any other route: CPU seconds of SmolLM2's export.
_WORK_OF_LONG_CONTEXT, _WORK_OF_NOISE = 3, 4


class _RouteError(CheckpointError):
    """ONNX Runtime cannot run the folder by a route."""


class Comparison:
    """A folder's sessions and routes against one reference."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        reference: Reference,
        passages: list[np.ndarray],
        *,
        tolerance: float | None,
        threads: int,
        device: str,
        progress: Progress,
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._reference = reference
        self._passages = passages
        self._tolerance = tolerance
        self._threads = threads
        self._device = device
        self._progress = progress
        # The processor's products alone round activations.
        self._rounds = reference.rounds and device == "cpu"
        # A scale that spans rows of logits spans those of one call, whose reference has to read the same calls.
        self._spans_rows = not shares_prefixes(Recipe(logits=manifest.options.logits))
        # Weights are proved by whole passages, masks and caches by their beginnings, at a third of the cost.
        self._beginnings = passages if self._spans_rows else beginnings(passages)
        self._outputs = (EMBEDDED, *(LAYER_OUTPUT.format(layer=i) for i in range(reference.layers)), "logits")
        self._whole = self._logits(passages, rounds=False)
        self._expectations: dict[bool, tuple[list[Tensor], float, StageNoise]] = {}
        self._far_noises: dict[int, StageNoise] = {}
        self._tokens: list[SessionTokens] = []
        self._done = self._total = 0
        self._cache: Measure | None = None
        self._reached = 0

    def verification(self, scales: Measure | None, rotation: Measure | None, bodies: Sequence[str]) -> Verification:
        """Results of the comparison.

        Args:
            scales: error of the cache's scales against calibration's; None if there is none to compare.
            rotation: error of the tables of cosines and sines; None without them.
            bodies: nodes whose attributes are not those of their function bodies.
        """
        compared: list[Route] = []
        failures: list[str] = []
        refusals: list[str] = []
        fallbacks: dict[str, int] = {}
        sessions = sessions_of(self._reference, self._rounds, self._device)
        # Prefill and padded batch, and with a cache four more.
        routes_of_one = 6 if self._manifest.options.cache else 2
        self._done, noises = 0, len({session.rounds for session in sessions})
        far = sum(not session.rounds for session in sessions)
        self._total = len(sessions) * routes_of_one + far * _WORK_OF_LONG_CONTEXT + noises * _WORK_OF_NOISE
        for session in sessions:
            self._advance(0, f"{session.name}, opening it")
            model = session.open(self._folder, self._threads, self._outputs[:-1], self._device)
            fallbacks |= model.fallbacks
            of_session: list[Route] = []
            try:
                for route in self._compared(session, model):
                    of_session.append(route)
                    work = _WORK_OF_LONG_CONTEXT if route.name == LONG_CONTEXT else 1
                    self._advance(work, f"{session.name}, {route.name}")
            except _RouteError as error:
                if session.is_folder and not of_session:
                    raise CheckpointError(f"ONNX Runtime cannot run {self._folder}: {error}") from error
                if session.runs_body and not of_session:
                    # GroupQueryAttention does not take every width of a head, the native kernel does.
                    refusals.append(f"{error}, and so the folder needs the native kernel")
                else:
                    failures.append(str(error))
            compared += of_session
        self._progress(1, 1, "done")
        return Verification(
            folder=self._folder,
            passages=len(self._passages),
            positions=sum(ids.shape[1] for ids in self._passages),
            reached=self._reached,
            stages=tuple(self._reference.stages),
            routes=tuple(compared),
            cache=self._cache,
            scales=scales,
            rotation=rotation,
            failures=tuple(failures),
            bodies=tuple(bodies),
            tokens=tuple(self._tokens),
            notes=(*self._notes(scales), *([on_cpu_text(fallbacks)] if fallbacks else []), *refusals),
        )

    def _advance(self, work: int, what: str) -> None:
        """Report that work is done."""
        self._done += work
        self._progress(self._done, self._total, what)

    def _compared(self, session: Session, model: OnnxModel) -> Iterator[Route]:
        """Every route of a session, compared."""
        # The function body's weights are those of the session before.
        passages = self._beginnings if session.runs_body else self._passages
        with self._running(session, PREFILL):
            read = prefill(model, passages, self._outputs)
        states = [run.tensors for run in read]
        begun = [[x[:, : ids.shape[1]] for x in of] for of, ids in zip(states, self._beginnings, strict=True)]
        if session.is_folder and self._reference.cache is not None:
            self._cache = Measure(cache_excess(self._reference, self._beginnings, begun), CACHE_LIMIT)
        # Sessions that compute alike share what rounding explains.
        if session.rounds not in self._expectations:
            self._advance(0, f"{session.name}, what rounding explains")
            self._expectations[session.rounds] = self._expected(session, begun, states)
            self._advance(_WORK_OF_NOISE, f"{session.name}, {PREFILL}")
        whole, limit, noise = self._expectations[session.rounds]
        last = [each[-1] for each in states]
        self._tokens.append(SessionTokens(session.name, compare_tokens(_cut(self._whole, last))))

        def logits_errors(runs: Sequence[Run]) -> tuple[Measure, Measure | None]:
            """Errors of the logits against the reference's and against prefill's."""
            is_cut = self._spans_rows and any(len(run.calls) > 1 for run in runs)
            wanted = self._logits(passages, session.rounds, runs=runs) if is_cut else whole
            against = [_relative_error(runs, others) for others in (wanted, *([] if is_cut else [last]))]
            return Measure(against[0], limit), None if is_cut else Measure(against[1], limit)

        def route(name: str, passages: list[np.ndarray], runs: Sequence[Run]) -> Route:
            firsts, readings = [run.first for run in runs], list(map(self._reading_of, runs))
            ids = [passage[:, : sum(run.calls)] for passage, run in zip(passages, runs, strict=False)]
            with self._reference.arithmetic(rounds=session.rounds):
                errors = stage_errors(self._reference, ids, [run.tensors for run in runs], firsts, readings)
            return Route(session.name, name, *measures(errors, noise, firsts, MARGIN), *logits_errors(runs))

        yield route(PREFILL, passages, read)
        for name, runner in routes(model, not self._spans_rows):
            with self._running(session, name):
                runs = runner(model, self._beginnings, self._outputs)
            yield route(name, self._beginnings, runs)
        if model.cache is not None:
            with self._running(session, IN_PLACE):
                # The folder itself is opened once more without a thing changed, as `diffquant run` uses it.
                used = (
                    OnnxModel(self._folder, self._threads, device=self._device, spins=False)
                    if session.is_folder
                    else model
                )
                runs = last_positions(used, self._beginnings)
            yield Route(session.name, IN_PLACE, (), (), *logits_errors(runs))
        # Rounded activations change products, of which the routes above have each kind; the graph is the same.
        if not session.rounds:
            yield self._long_context(session, model, noise)

    def _long_context(self, session: Session, model: OnnxModel, usual: StageNoise) -> Route:
        """Calls far into the context, each held to what rounding does to such calls."""
        found: list[tuple[tuple[Measure, ...], tuple[Measure, ...]]] = []
        self._reached = reach(model, self._reference.model.config.max_position_embeddings)
        calls = far_calls(model, self._reference, self._passages, self._outputs)
        while far := self._next(calls, session):
            states = [list(map(as_float32, each)) for each in far.states]
            firsts, readings = [0] * len(states), [far.reading] * len(states)
            errors = stage_errors(self._reference, far.sequences, states, firsts, readings)
            # Sessions share what rounding explains here, too.
            if (number := len(found)) not in self._far_noises:
                noise = stage_noise(self._reference, far.sequences, states, False, far.reading, True)
                self._far_noises[number] = noise
            found.append(far_measures(errors, self._far_noises[number], usual, MARGIN))
        typical, largest = (nearest_limits(parts) for parts in zip(*found, strict=True))
        return Route(session.name, LONG_CONTEXT, typical, largest, None, None)

    def _next(self, calls: Iterator[FarCalls], session: Session) -> FarCalls | None:
        with self._running(session, LONG_CONTEXT):
            return next(calls, None)

    @contextmanager
    def _running(self, session: Session, route: str) -> Iterator[None]:
        """Say of an error of the runtime's where it arose."""
        try:
            yield
        except _RUNTIME_ERRORS as error:
            raise _RouteError(f"{session.name}, {route}: does not run ({error})") from error

    def _reading_of(self, run: Run) -> Reading:
        return Reading(run.calls) if self._spans_rows and len(run.calls) > 1 else WHOLE

    def _logits(
        self, passages: list[np.ndarray], rounds: bool, noise: float | None = None, runs: Sequence[Run] | None = None
    ) -> list[Tensor]:
        """Logits of passages by the reference, whole or as some runs read them."""
        readings = [WHOLE for _ in passages] if runs is None else map(self._reading_of, runs)
        logits = []
        with self._reference.arithmetic(rounds=rounds, noise=noise):
            for ids, reading in zip(passages, readings, strict=False):
                with self._reference.reading(reading):
                    logits.append(self._reference.run(ids))
        return logits

    def _expected(
        self, session: Session, begun: list[list[Tensor]], read: list[list[Tensor]]
    ) -> tuple[list[Tensor], float, StageNoise]:
        """Logits that a session should have, how far they may be off, and what rounding does to its stages."""
        whole = self._logits(self._passages, rounds=True) if session.rounds else self._whole
        rounds_anew = session.rounds and self._reference.knows_rounding
        limit = self._tolerance
        if limit is None:
            disturbed = self._logits(self._passages, rounds_anew, self._reference.flipping)
            limit = MARGIN * relative_rms(zip(disturbed, whole, strict=True))
        noise = stage_noise(self._reference, self._beginnings, begun, session.rounds, whole=(self._passages, read))
        return whole, limit, noise

    def _notes(self, scales: Measure | None) -> Iterator[str]:
        """Sentences about int8 activations, and about what was not compared."""
        if self._device == "cpu" and not self._reference.knows_rounding:
            yield (
                "ONNX Runtime rounds activations on this processor by a rule unknown here: products with int8 "
                "activations are held to no more than what such rounding costs"
            )
        # Beside wider codes activations are rounded in any case.
        has_choice = any(tensor["container_bits"] == 4 for tensor in self._manifest.tensors.values())
        if self._rounds and has_choice and loses_tokens(self._tokens):
            rounded, exact = (each.tokens.agreement for each in self._tokens[:2])
            yield (
                f"the likeliest token is torch's at {rounded:.1%} of the positions, and at {exact:.1%} with float32 "
                f"products: where that matters, export with {spelled('accuracy_level', 1)}, which is slower"
            )
        if self._reference.cache is not None and scales is None:
            yield (
                "the folder has no record of its cache's calibration, which older versions did not write: the scales "
                f"are held to no more than a factor of {CACHE_LIMIT:g}; export it again to have each compared"
            )
        positions = self._reference.model.config.max_position_embeddings
        if self._reached < positions:
            why = "more rows of a cache take much memory" if self._manifest.options.cache else "there is no cache"
            yield f"of {positions:,} positions of the context {self._reached:,} were reached: {why}"


def _relative_error(runs: Sequence[Run], wanted: Sequence[Tensor]) -> float:
    """Relative RMS error of the logits of some runs, where they tell a route from prefill."""
    return relative_rms(
        (got[:, run.first :], logits[:, run.first :])
        for run, (logits, got) in zip(runs, _cut(wanted, [as_float32(run.states[-1]) for run in runs]), strict=True)
    )


def _cut(wanted: Sequence[Tensor], got: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits of whole passages as far as others, of their beginnings or of some of them, reach."""
    return ((whole[:, : some.shape[1]], some) for whole, some in zip(wanted, got, strict=False))
