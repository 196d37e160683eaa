"""Proof that an exported folder is its model: ONNX Runtime against torch, stage by stage and route by route."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from onnxruntime.capi import onnxruntime_pybind11_state as runtime_errors
from torch import Tensor

from diffquant.errors import CheckpointError, ToleranceError
from diffquant.export.graph.decoder import EMBEDDED, LAYER_OUTPUT
from diffquant.export.graph.external import load_graph
from diffquant.export.manifest import Manifest, check_unchanged, read_manifest
from diffquant.export.native import library_path
from diffquant.export.runtime.device import RuntimeDevice, on_cpu_text
from diffquant.export.runtime.session import OnnxModel
from diffquant.export.verification.errors import StageNoise, cache_excess, relative_rms, stage_errors, stage_noise
from diffquant.export.verification.passages import sample_passages
from diffquant.export.verification.reference import FLIPPING, Reference, cache_scales
from diffquant.export.verification.report import Measure, Route, SessionTokens, Verification, measures
from diffquant.export.verification.routes import IN_PLACE, Run, decoded_in_place, prefill, routes
from diffquant.export.verification.tokens import compare_tokens
from diffquant.source.source import Source, open_source
from diffquant.support.digests import FileDigests

_RUNTIME_ERRORS = (runtime_errors.InvalidArgument, runtime_errors.Fail, runtime_errors.NotImplemented)

# A difference may be this many times what rounding alone makes of the reference.
MARGIN = 4.0
# Typical rounding of the cache against that under scales fitted to the passages themselves: two bits lost.
CACHE_LIMIT = 4.0


@dataclass(frozen=True)
class _Session:
    """One way of opening the folder, with every stage's output to be seen.

    Attributes:
        name: what users call it.
        model: the folder, opened.
        rounds: whether its products round activations to int8.
        is_folder: whether it computes what the folder does where nothing is changed.
        runs_body: whether attention is the function body although there is a native kernel.
    """

    name: str
    model: OnnxModel
    rounds: bool
    is_folder: bool = False
    runs_body: bool = False


def verify(
    folder: Path, source: Path | str | Source, tolerance: float | None = None, threads: int = 0, device: str = "auto"
) -> Verification:
    """Compare an exported folder with the checkpoint it was made from.

    Args:
        folder: folder that `export` wrote.
        source: checkpoint that it was exported from.
        tolerance: relative RMS error allowed of the logits of whole runs; by default a few times what rounding alone
            does to the reference.
        threads: number of ONNX Runtime's threads; 0 takes all cores.
        device: where ONNX Runtime computes: "auto", "cpu", "cuda" or "cuda:N"; the reference stays on the processor.

    Raises:
        CheckpointError: the folder was edited after export, or made from another checkpoint.
        MissingDependencyError: ONNX Runtime cannot use the device.
        ToleranceError: something differs by more than rounding explains; its `report` is the Verification.
    """
    folder, source = Path(folder), open_source(source)
    source.transformer("verify")
    chosen = RuntimeDevice.parse(device)
    chosen.check()
    manifest = read_manifest(folder)
    check_unchanged(folder, manifest)
    _check_source(manifest, source)
    reference = Reference(source, manifest.options, cache_scales(load_graph(folder)))
    passages = sample_passages(source, reference.model.config)
    verification = _Comparison(folder, manifest, reference, passages, tolerance, threads, chosen.name).verification()
    if not verification.passed:
        raise ToleranceError(f"{folder} does not compute what {source.path} does:\n{verification}", verification)
    return verification


class _Comparison:
    """A folder's sessions and routes against one reference."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        reference: Reference,
        passages: list[np.ndarray],
        tolerance: float | None,
        threads: int,
        device: str,
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._reference = reference
        self._passages = passages
        self._tolerance = tolerance
        self._threads = threads
        self._device = device
        # The processor's products alone round activations.
        self._rounds = reference.rounds and device == "cpu"
        self._outputs = (EMBEDDED, *(LAYER_OUTPUT.format(layer=i) for i in range(reference.layers)), "logits")
        self._whole = self._whole_runs(rounds=False)
        self._expectations: dict[bool, tuple[list[Tensor], float, StageNoise]] = {}
        self._tokens: list[SessionTokens] = []
        self._cache: Measure | None = None

    def verification(self) -> Verification:
        compared: list[Route] = []
        refusals: list[str] = []
        fallbacks: dict[str, int] = {}
        for session in self._sessions():
            fallbacks |= session.model.fallbacks
            try:
                compared += self._compared(session)
            except _RUNTIME_ERRORS as error:
                if session.is_folder or not session.runs_body:
                    raise CheckpointError(f"ONNX Runtime cannot run {self._folder}: {error}") from error
                # GroupQueryAttention does not take every width of a head, the native kernel does.
                refusals.append(f"{session.name}: does not run, and so the folder needs the native kernel ({error})")
        return Verification(
            self._folder,
            len(self._passages),
            sum(ids.shape[1] for ids in self._passages),
            tuple(self._reference.stages),
            tuple(compared),
            self._cache,
            tuple(self._tokens),
            (*self._notes(), *([on_cpu_text(fallbacks)] if fallbacks else []), *refusals),
        )

    def _sessions(self) -> Iterator[_Session]:
        """The folder as it is, with float32 products where it rounds activations, and without the native kernel."""
        rounds = self._rounds
        yield _Session("int8 activations" if rounds else "as exported", self._open(), rounds, is_folder=True)
        if rounds:
            # What rounding hides is seen here: nothing but float32 arithmetic lies between this and torch.
            yield _Session("float32 products", self._open(1), False)
        # A Transformer's attention over a float cache is ONNX Runtime's own either way.
        has_kernel = self._reference.model.config.diff_spec.maps > 1 or self._reference.cache is not None
        if library_path() is not None and self._device == "cpu" and has_kernel:
            yield _Session("function body", self._open(1 if rounds else None, native=False), False, runs_body=True)

    def _open(self, accuracy_level: int | None = None, native: bool = True) -> OnnxModel:
        seen = self._outputs[:-1]
        return OnnxModel(self._folder, self._threads, seen, accuracy_level, native, self._device)

    def _compared(self, session: _Session) -> Iterator[Route]:
        """Every route of a session, compared."""
        options = self._manifest.options
        read = _states_of(prefill(session.model, self._passages, self._outputs))
        # Sessions that compute alike share what rounding explains.
        if session.rounds not in self._expectations:
            self._expectations[session.rounds] = self._expected(session, read)
        whole, limit, noise = self._expectations[session.rounds]
        last = [states[-1] for states in read]
        self._tokens.append(SessionTokens(session.name, compare_tokens(zip(self._whole, last, strict=True))))
        if session.is_folder and self._reference.cache is not None:
            self._cache = Measure(cache_excess(self._reference, self._passages, read), CACHE_LIMIT)

        def logits_errors(runs: Sequence[Run]) -> tuple[Measure, Measure]:
            """Errors of the logits against the reference's and against prefill's."""
            values = [
                relative_rms(
                    (states[-1][:, run.first :], other[:, run.first :])
                    for run, states, other in zip(runs, _states_of(runs), others, strict=False)
                )
                for others in (whole, last)
            ]
            return Measure(values[0], limit), Measure(values[1], limit)

        for name, route in routes(session.model, options):
            runs = route(session.model, self._passages, self._outputs)
            firsts = [run.first for run in runs]
            with self._reference.arithmetic(rounds=session.rounds):
                errors = stage_errors(self._reference, self._passages, _states_of(runs), firsts)
            yield Route(session.name, name, *measures(errors, noise, firsts, MARGIN), *logits_errors(runs))
        if session.model.cache is not None:
            # The folder itself is opened once more without a thing changed, as `diffquant run` uses it.
            model = OnnxModel(self._folder, self._threads, device=self._device) if session.is_folder else session.model
            runs = [decoded_in_place(model, self._passages[0])]
            yield Route(session.name, IN_PLACE, (), (), *logits_errors(runs))

    def _whole_runs(self, rounds: bool, noise: float | None = None) -> list[Tensor]:
        """Logits of every passage, by the reference."""
        with self._reference.arithmetic(rounds=rounds, noise=noise):
            return [self._reference.run(ids) for ids in self._passages]

    def _expected(self, session: _Session, read: list[list[Tensor]]) -> tuple[list[Tensor], float, StageNoise]:
        """Logits that a session should have, how far they may be off, and what rounding does to its stages."""
        whole = self._whole_runs(rounds=True) if session.rounds else self._whole
        rounds_anew = session.rounds and self._reference.knows_rounding
        limit = self._tolerance
        if limit is None:
            limit = MARGIN * relative_rms(zip(self._whole_runs(rounds_anew, FLIPPING), whole, strict=True))
        return whole, limit, stage_noise(self._reference, self._passages, read, session.rounds)

    def _notes(self) -> Iterator[str]:
        """Sentences about int8 activations."""
        if self._device == "cpu" and not self._reference.knows_rounding:
            yield (
                "ONNX Runtime rounds activations on this processor by a rule unknown here: products with int8 "
                "activations are held to no more than what such rounding costs"
            )
        if self._rounds and self._tokens[0].tokens.agreement < self._tokens[1].tokens.agreement:
            yield "where that difference matters, export with --accuracy-level 1, which is slower"


def _states_of(runs: Sequence[Run]) -> list[list[Tensor]]:
    """States of each passage's run in float32."""
    return [[torch.from_numpy(values.astype(np.float32)) for values in run.states] for run in runs]


def _check_source(manifest: Manifest, source: Source) -> None:
    exported = manifest.weights
    if FileDigests.of(source.checkpoint.weight_files(), exported.algorithm).contents != exported.contents:
        raise CheckpointError(
            f"the folder was exported from {manifest.source['name']}, whose weights are not those of {source.path}; "
            "verify it against its own checkpoint"
        )
