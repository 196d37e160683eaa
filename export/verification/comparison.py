"""Comparison of an exported folder in ONNX Runtime with its torch reference, stage by stage and route by route."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from diffquant.errors import CheckpointError
from diffquant.measure import can_share_prefixes
from diffquant.onnx.graph.decoder import EMBEDDED, LAYER_OUTPUT
from diffquant.onnx.graph.plan import CACHE_LIMIT
from diffquant.onnx.manifest import Manifest
from diffquant.onnx.runtime.device import describe_cpu_nodes
from diffquant.onnx.runtime.session import GraphError, OnnxModel
from diffquant.onnx.verification.caches import WHOLE, CallPattern
from diffquant.onnx.verification.errors import (
    StageErrors,
    StageNoise,
    compute_stage_errors,
    find_worst_cache_layer,
    measure_stage_noise,
    relative_rms,
)
from diffquant.onnx.verification.passages import LONG_CONTEXT, count_reached_positions, cut_beginnings, run_far_tokens
from diffquant.onnx.verification.reference import Reference
from diffquant.onnx.verification.report import MARGIN, Measure, RouteErrors, Verification, measure_stages, worst_measure
from diffquant.onnx.verification.routes import (
    IN_PLACE,
    PREFILL,
    Run,
    SessionSettings,
    as_float32,
    iterate_routes,
    list_sessions,
    pair_logits,
    prefill,
    relative_error,
    run_last_positions,
)
from diffquant.onnx.verification.tokens import TokenComparison, compare_tokens, has_lower_agreement
from diffquant.recipe import Recipe
from diffquant.support.names import option_name
from diffquant.support.progress import Progress

# Work of the long-context route, and of measuring rounding, in units of any other route: from SmolLM2's CPU seconds.
_WORK_OF_LONG_CONTEXT, _WORK_OF_NOISE = 3, 4


@dataclass
class Comparison:
    """Compares an exported folder with its torch reference in every session and by all routes (`iterate_routes`).

    Attributes:
        passages: token ids [1, T] of the test passages.
        tolerance: limit of the logits' relative RMS error, or None to derive it from the error that rounding causes.
        threads: number of ONNX Runtime's threads; 0 uses all cores.
    """

    folder: Path
    manifest: Manifest
    reference: Reference
    passages: list[np.ndarray]
    tolerance: float | None
    threads: int
    device: str
    progress: Progress

    def __post_init__(self) -> None:
        reference, passages = self.reference, self.passages
        # Only the CPU's matmuls round activations.
        self._rounds = reference.rounds and self.device == "cpu"
        # A logit scale that spans rows depends on the tokens of a call, so the reference must split the same way.
        self._spans_rows = not can_share_prefixes(Recipe(logits=self.manifest.options.logits))
        # Whole passages with float32 matmuls verify the weights; the beginnings suffice for the rest, at a third of
        # the cost.
        self._beginnings = passages if self._spans_rows else cut_beginnings(passages)
        self._outputs = (EMBEDDED, *(LAYER_OUTPUT.format(layer=i) for i in range(reference.layers)), "logits")
        self._whole = self._logits(passages, rounds=False)
        self._expectations: dict[bool, tuple[list[Tensor], float, StageNoise]] = {}
        self._far_noises: dict[int, StageNoise] = {}
        self._tokens: dict[str, TokenComparison] = {}
        self._done = 0
        self._cache: Measure | None = None
        self._cache_layer, self._cache_clips = 0, False
        self._reached = 0

    def verify_all_routes(
        self, scales: Measure | None, rotation: Measure | None, bodies: Sequence[str]
    ) -> Verification:
        """Run all routes in all sessions, and return the result.

        Args:
            scales: error of the cache's scales, to include in the result, or None if it is unknown.
            rotation: error of the RoPE tables, to include in the result, or None if there are no tables.
            bodies: sentences on nodes that differ from their function bodies, to include in the result.
        """
        compared: list[RouteErrors] = []
        failures: list[str] = []
        refusals: list[str] = []
        fallbacks: dict[str, int] = {}
        sessions = list_sessions(self.reference, self._rounds, self.device)
        # Prefill and padded batch; four more with a cache.
        routes_of_one = 6 if self.manifest.options.cache else 2
        noises = len({session.rounds for session in sessions})
        far = sum(not session.rounds for session in sessions)
        self._total = len(sessions) * routes_of_one + far * _WORK_OF_LONG_CONTEXT + noises * _WORK_OF_NOISE
        for session in sessions:
            self._advance(0, f"{session.name}, opening it")
            model = session.open(self.folder, self.threads, self._outputs[:-1], self.device)
            fallbacks |= model.cpu_node_counts
            of_session: list[RouteErrors] = []
            try:
                for route in self._compare_routes(session, model):
                    of_session.append(route)
                    work = _WORK_OF_LONG_CONTEXT if route.name == LONG_CONTEXT else 1
                    self._advance(work, f"{session.name}, {route.name}")
            except GraphError as error:
                if session.is_as_exported and not of_session:
                    raise CheckpointError(f"ONNX Runtime cannot run {self.folder}: {error}") from error
                if session.runs_body and not of_session:
                    # The native kernel supports every head width, GroupQueryAttention does not.
                    refusals.append(f"{error}, and so the folder needs the native kernel")
                else:
                    failures.append(str(error))
            compared += of_session
        self.progress(1, 1, "done")
        return Verification(
            folder=self.folder,
            passages=len(self.passages),
            positions=sum(ids.shape[1] for ids in self.passages),
            reached=self._reached,
            stages=tuple(self.reference.stages),
            routes=tuple(compared),
            cache=self._cache,
            cache_layer=self._cache_layer,
            cache_clips=self._cache_clips,
            scales=scales,
            rotation=rotation,
            failures=tuple(failures),
            bodies=tuple(bodies),
            tokens=self._tokens,
            notes=(*self._notes(scales), *([describe_cpu_nodes(fallbacks)] if fallbacks else []), *refusals),
        )

    def _advance(self, work: int, what: str) -> None:
        """Add finished work to the progress, and report it."""
        self._done += work
        self.progress(self._done, self._total, what)

    def _compare_routes(self, session: SessionSettings, model: OnnxModel) -> Iterator[RouteErrors]:
        """Run every route of a session and yield its errors."""
        # The function-body session has the same weights as the one before, which whole passages verified.
        read_by_runtime = self._beginnings if session.runs_body else self.passages
        with session.explain_errors(PREFILL):
            read = prefill(model, read_by_runtime, self._outputs)
        last = [as_float32(run.states[-1]) for run in read]
        self._tokens[session.name] = compare_tokens(pair_logits(self._whole, last))
        begun = [run.cut_to(ids.shape[1]) for run, ids in zip(read, self._beginnings, strict=True)]
        passages, read = (self._beginnings, begun) if session.rounds else (read_by_runtime, read)
        # Whole passages come first: the reference then has their beginnings in its memory.
        errors = self._stage_errors(session, passages, read)
        # Sessions with the same arithmetic share the measured effect of rounding.
        if session.rounds not in self._expectations:
            self._advance(0, f"{session.name}, what rounding explains")
            states = [[run.tensors for run in runs] for runs in (begun, read)]
            self._expectations[session.rounds] = self._compute_expected(session, states[0], (passages, states[1]))
            self._advance(_WORK_OF_NOISE, f"{session.name}, {PREFILL}")
        whole, limit, noise = self._expectations[session.rounds]
        if self._cache is None and self.reference.cache is not None and not session.rounds:
            fit = find_worst_cache_layer(self.reference, self._beginnings, [run.tensors for run in begun])
            self._cache_layer, self._cache = fit[0], Measure(fit[1], CACHE_LIMIT)
            self._cache_clips = self.reference.cache.has_clipped(fit[0])

        def logits_errors(runs: Sequence[Run]) -> tuple[Measure, Measure | None]:
            """Return the errors of the logits against the reference's and against prefill's."""
            is_cut = self._spans_rows and any(len(run.calls) > 1 for run in runs)
            wanted = self._logits(self._beginnings, session.rounds, runs=runs) if is_cut else whole
            against = [relative_error(runs, others) for others in (wanted, *([] if is_cut else [last]))]
            return Measure(against[0], limit), None if is_cut else Measure(against[1], limit)

        def route(name: str, errors: StageErrors, runs: Sequence[Run]) -> RouteErrors:
            found = measure_stages(errors, noise.median_error_bounds([run.first for run in runs]), noise.largest)
            return RouteErrors(session.name, name, *found, *logits_errors(runs))

        yield route(PREFILL, errors, read)
        for name, runner in iterate_routes(model, not self._spans_rows):
            with session.explain_errors(name):
                runs = runner(model, self._beginnings, self._outputs)
            yield route(name, self._stage_errors(session, self._beginnings, runs), runs)
        if model.cache is not None:
            with session.explain_errors(IN_PLACE):
                used = model
                if session.is_as_exported:
                    # Opened again without changes, as `diffquant run` opens it.
                    used = OnnxModel(self.folder, self.threads, device=self.device, spins=False)
                runs = run_last_positions(used, self._beginnings)
            yield RouteErrors(session.name, IN_PLACE, (), (), *logits_errors(runs))
        # Rounded activations affect only matmuls, all kinds of which the routes above run; the graph is the same.
        if not session.rounds:
            yield self._long_context(session, model, noise)

    def _stage_errors(
        self, session: SessionSettings, passages: Sequence[np.ndarray], runs: Sequence[Run]
    ) -> StageErrors:
        """Return the errors of the stages in some runs of passages."""
        ids = [passage[:, : sum(run.calls)] for passage, run in zip(passages, runs, strict=False)]
        firsts, readings = [run.first for run in runs], list(map(self._reading_of, runs))
        with self.reference.change_arithmetic(rounds=session.rounds):
            return compute_stage_errors(self.reference, ids, [run.tensors for run in runs], firsts, readings)

    def _long_context(self, session: SessionSettings, model: OnnxModel, usual: StageNoise) -> RouteErrors:
        """Compare calls at far positions of the context, each with the error that rounding explains."""
        found: list[tuple[tuple[Measure, ...], tuple[Measure, ...]]] = []
        self._reached = count_reached_positions(model, self.reference.model.config.max_position_embeddings)
        calls = run_far_tokens(model, self.reference, self.passages, self._outputs)
        while True:
            with session.explain_errors(LONG_CONTEXT):
                far = next(calls, None)
            if far is None:
                break
            reading, sequences, given = far
            states = [list(map(as_float32, each)) for each in given]
            errors = compute_stage_errors(self.reference, sequences, states, [0] * len(states), [reading] * len(states))
            # Sessions share the measured effect of rounding here, too.
            if (number := len(found)) not in self._far_noises:
                self._far_noises[number] = measure_stage_noise(self.reference, sequences, states, False, reading, True)
            noise = self._far_noises[number]
            # The passages have many more positions, so flips are likelier among them.
            largest_noise = max(noise.largest, usual.largest)
            found.append(measure_stages(errors, noise.flipped.quantile(0.9), largest_noise))
        typical, largest = (tuple(map(worst_measure, zip(*parts, strict=True))) for parts in zip(*found, strict=True))
        return RouteErrors(session.name, LONG_CONTEXT, typical, largest, None, None)

    def _reading_of(self, run: Run) -> CallPattern:
        return CallPattern(run.calls) if self._spans_rows and len(run.calls) > 1 else WHOLE

    def _logits(
        self, passages: list[np.ndarray], rounds: bool, noise: float | None = None, runs: Sequence[Run] | None = None
    ) -> list[Tensor]:
        """Compute the reference's logits of passages, in one call each or split into calls as `runs` were."""
        logits = []
        with self.reference.change_arithmetic(rounds=rounds, noise=noise):
            if runs is None:
                return self.reference.compute_logits(passages)
            for ids, reading in zip(passages, map(self._reading_of, runs), strict=False):
                with self.reference.use_call_pattern(reading):
                    logits += self.reference.compute_logits([ids])
        return logits

    def _compute_expected(
        self,
        session: SessionSettings,
        begun: list[list[Tensor]],
        whole_states: tuple[list[np.ndarray], list[list[Tensor]]],
    ) -> tuple[list[Tensor], float, StageNoise]:
        """Return a session's expected logits, the limit of their relative error, and the rounding noise by stage."""
        passages = self._beginnings if session.rounds else self.passages
        whole = self._logits(passages, rounds=True) if session.rounds else self._whole
        rounds_anew = session.rounds and self.reference.knows_rounding
        limit = self.tolerance
        if limit is None:
            disturbed = self._logits(passages, rounds_anew, self.reference.flipping)
            limit = MARGIN * relative_rms(zip(disturbed, whole, strict=True))
        noise = measure_stage_noise(self.reference, self._beginnings, begun, session.rounds, whole=whole_states)
        return whole, limit, noise

    def _notes(self, scales: Measure | None) -> Iterator[str]:
        """Yield sentences about int8 activations, and about what was not compared."""
        if self.device == "cpu" and not self.reference.knows_rounding:
            yield (
                "ONNX Runtime rounds activations on this CPU by an unknown rule: matmuls with int8 activations are "
                "only checked against the error that such rounding causes"
            )
        # With codes of more than 4 bits, activations are always rounded.
        has_choice = any(tensor["container_bits"] == 4 for tensor in self.manifest.tensors.values())
        if self._rounds and has_choice and has_lower_agreement(self._tokens):
            rounded, exact = [each.agreement for each in self._tokens.values()][:2]
            yield (
                f"the top-1 token equals torch's at {rounded:.1%} of the positions, and at {exact:.1%} with float32 "
                f"matmuls: where that matters, export with {option_name('accuracy_level', 1)}, which is slower"
            )
        if self.reference.cache is not None and scales is None:
            yield (
                "the folder has no record of its cache's calibration, which older versions did not write: scales are "
                f"only checked to within a factor of {CACHE_LIMIT:g}; export it again to compare each"
            )
        positions = self.reference.model.config.max_position_embeddings
        if self._reached < positions:
            why = "longer caches need too much memory" if self.manifest.options.cache else "there is no cache"
            yield f"{self._reached:,} of the context's {positions:,} positions were tested: {why}"
