"""Proof that an exported folder is its model: ONNX Runtime against torch, route by route."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diffquant.data import books_text
from diffquant.errors import CheckpointError, ToleranceError
from diffquant.export.graph.decoder import LAYER_OUTPUT
from diffquant.export.graph.external import load_graph
from diffquant.export.manifest import Manifest, check_unchanged, read_manifest
from diffquant.export.options import ExportOptions
from diffquant.export.runtime.session import OnnxModel
from diffquant.export.verification.reference import Reference, cache_scales
from diffquant.source.source import Source, open_source
from diffquant.support.files import file_digest

_LENGTH, _DECODED = 64, 8
# Relative RMS error allowed of the logits. Two float32 programs differ by rounding alone; a rounded cache or
# logit may fall to the neighbouring code; half types and int8 activations round every product.
_FLOAT, _ROUNDED, _HALF, _INT8 = 1e-4, 5e-2, 2e-2, 2e-1
_EXACT = "float32 products"


@dataclass(frozen=True)
class Route:
    """One way of running a sequence, against torch.

    Attributes:
        name: what users call the route.
        error: relative RMS error of the logits.
        largest: largest absolute difference.
        agreement: share of positions with the same likeliest token.
        tolerance: largest `error` allowed.
    """

    name: str
    error: float
    largest: float
    agreement: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance

    def __str__(self) -> str:
        return (
            f"{self.name:16}  error {self.error:.1e} (tolerance {self.tolerance:.0e})  max {self.largest:.1e}  "
            f"same token {self.agreement:.1%}"
        )


@dataclass(frozen=True)
class Verification:
    """How an exported folder compares with its checkpoint.

    Attributes:
        folder: folder that was verified.
        routes: comparison of each way of running it.
        layers: relative RMS error of each layer's output in prefill.
        advice: sentence about `accuracy_level`; empty where there is nothing to choose.
    """

    folder: Path
    routes: tuple[Route, ...]
    layers: tuple[float, ...]
    advice: str

    @property
    def passed(self) -> bool:
        return all(route.passed for route in self.routes)

    @property
    def agreement(self) -> float:
        """Mean share of positions with the same likeliest token."""
        return sum(route.agreement for route in self.routes) / len(self.routes)

    def __str__(self) -> str:
        largest = max(route.largest for route in self.routes)
        verdict = f"all values close (max {largest:.1e})" if self.passed else self.divergence()
        return "\n".join([*map(str, self.routes), verdict, *([self.advice] if self.advice else [])])

    def divergence(self) -> str:
        """A sentence about where the model first leaves its tolerance."""
        tolerance = self.routes[0].tolerance
        layer = next((i for i, error in enumerate(self.layers) if not error <= tolerance), None)
        if layer is not None:
            return f"diverges first in layer {layer} (relative RMS error {self.layers[layer]:.1e})"
        wrong = ", ".join(f"{route.name} ({route.error:.1e})" for route in self.routes if not route.passed)
        return f"every layer's output is close in prefill; these logits are not: {wrong}"


def verify(folder: Path, source: Path | str | Source, tolerance: float | None = None, threads: int = 0) -> Verification:
    """Compare an exported folder with the checkpoint it was made from.

    Args:
        folder: folder that `export` wrote.
        source: checkpoint that it was exported from.
        tolerance: relative RMS error allowed of the logits; by default what the export's precision explains.
        threads: number of ONNX Runtime's threads; 0 takes all cores.

    Raises:
        CheckpointError: the folder was edited after export, or made from another checkpoint.
        ToleranceError: a route differs by more than the tolerance.
    """
    folder, source = Path(folder), open_source(source)
    manifest = read_manifest(folder)
    check_unchanged(folder, manifest)
    _check_source(manifest, source)
    reference = Reference(source, manifest.options, cache_scales(load_graph(folder)))
    verification = _compare(folder, reference, manifest, sample_sequences(source, reference), tolerance, threads)
    if not verification.passed:
        raise ToleranceError(f"{folder} does not compute what {source.path} does:\n{verification}")
    return verification


def default_tolerance(options: ExportOptions) -> float:
    """Relative RMS error that the export's types explain, int8 activations apart."""
    if options.dtype == "float16":
        return _HALF
    return _ROUNDED if options.kv_bits < 16 or options.logits.quantizes else _FLOAT


def sample_sequences(source: Source, reference: Reference) -> list[np.ndarray]:
    """Three sequences of token ids of different length: prose where there is a tokenizer, else random."""
    config = reference.model.config
    longest = min(_LENGTH, config.max_position_embeddings - 1)
    lengths = [longest, max(1, longest // 2), max(1, longest // 5)]
    try:
        ids = source.tokenizer(books_text()[: 20 * longest])["input_ids"]
    except CheckpointError:
        ids = []
    if len(ids) < 2 * longest or max(ids) >= config.vocab_size:
        ids = np.random.default_rng(0).integers(0, config.vocab_size, 2 * longest).tolist()
    return [np.array([ids[i * 7 : i * 7 + length]], np.int64) for i, length in enumerate(lengths)]


def _compare(
    folder: Path,
    reference: Reference,
    manifest: Manifest,
    sequences: list[np.ndarray],
    tolerance: float | None,
    threads: int,
) -> Verification:
    names = tuple(LAYER_OUTPUT.format(layer=i) for i in range(reference.model.config.num_hidden_layers))
    model = OnnxModel(folder, threads, extra_outputs=names)
    expected = [reference.run(ids) for ids in sequences]
    (_, *layers), _ = model.run(sequences[0], np.ones_like(sequences[0]), model.empty_cache(1), ("logits", *names))
    wanted = [logits for logits, _ in expected]
    exact = tolerance or default_tolerance(manifest.options)
    rounds = _has_int8_activations(manifest)
    allowed = tolerance or (_INT8 if rounds else exact)
    routes = [_compared(name, run, sequences, wanted, allowed) for name, run in _routes(model, manifest.options)]
    if rounds:
        # Without the rounding of activations nothing excuses a difference: this proves codes and scales.
        twin = OnnxModel(folder, threads, accuracy_level=1)
        routes.append(_compared(_EXACT, _prefill(twin), sequences, wanted, exact))
    layer_errors = tuple(relative_rms(got, want) for got, want in zip(layers, expected[0][1], strict=True))
    return Verification(folder, tuple(routes), layer_errors, _advice(manifest.options, routes) if rounds else "")


# From sequences to the logits of each, or of the first alone.
Runner = Callable[[list[np.ndarray]], list[np.ndarray]]


def _routes(model: OnnxModel, options: ExportOptions) -> Iterator[tuple[str, Runner]]:
    """Every way to run the model that must give the logits of a whole sequence."""
    yield "prefill", _prefill(model)
    yield "padded batch", lambda sequences: _padded(model, sequences)
    # A logit scale that spans rows spans those of a call: chunks have scales of their own.
    if model.cache is not None and options.logits.granularity in ("", "row"):
        yield "chunked prefill", lambda sequences: [_in_chunks(model, sequences[0], _thirds(sequences[0].shape[1]))]
        yield "decode", lambda sequences: [_in_chunks(model, sequences[0], _prompt_then_tokens(sequences[0].shape[1]))]
        yield "batch decode", lambda sequences: _padded_then_decoded(model, sequences)


def _compared(name: str, run: Runner, sequences: list[np.ndarray], wanted: list[np.ndarray], tolerance: float) -> Route:
    got = [logits.astype(np.float32) for logits in run(sequences)]
    # Routes that read the first sequence alone give the logits of no other.
    compared = wanted[: len(got)]
    left, right = (
        np.concatenate([logits.reshape(-1, logits.shape[-1]) for logits in side]) for side in (got, compared)
    )
    same = float((left.argmax(-1) == right.argmax(-1)).mean())
    return Route(name, relative_rms(left, right), float(np.abs(left - right).max()), same, tolerance)


def relative_rms(got: np.ndarray, wanted: np.ndarray) -> float:
    """Root mean square of the difference over that of `wanted` about its mean along the last axis."""
    exact = wanted.astype(np.float64)
    spread = exact - exact.mean(-1, keepdims=True)
    return float(np.sqrt(np.square(got - exact).mean() / max(np.square(spread).mean(), 1e-30)))


def _prefill(model: OnnxModel) -> Runner:
    return lambda sequences: [_in_chunks(model, sequences[0], [sequences[0].shape[1]])]


def _in_chunks(model: OnnxModel, ids: np.ndarray, lengths: list[int]) -> np.ndarray:
    cache, start, parts = model.empty_cache(1), 0, []
    for length in lengths:
        chunk = ids[:, start : start + length]
        start += length
        (logits,), cache = model.run(chunk, np.ones((1, start), np.int64), cache)
        parts.append(logits)
    return np.concatenate(parts, 1)


def _padded(model: OnnxModel, sequences: list[np.ndarray]) -> list[np.ndarray]:
    (logits,), _ = model.run(*_right_padded(sequences), model.empty_cache(len(sequences)))
    return [row[None, : ids.shape[1]] for row, ids in zip(logits, sequences, strict=True)]


def _padded_then_decoded(model: OnnxModel, sequences: list[np.ndarray]) -> list[np.ndarray]:
    """Logits of each sequence, read as a padded batch but for the last tokens, which are decoded in one step."""
    padded, mask = _right_padded([ids[:, :-1] for ids in sequences])
    (logits,), cache = model.run(padded, mask, model.empty_cache(len(sequences)))
    last = np.concatenate([ids[:, -1:] for ids in sequences])
    longer = np.pad(mask, ((0, 0), (0, 1)))
    for row, ids in zip(longer, sequences, strict=True):
        row[ids.shape[1] - 1] = 1
    (final,), _ = model.run(last, longer, cache)
    joined = zip(logits, final, sequences, strict=True)
    return [np.concatenate([row[: ids.shape[1] - 1], end])[None] for row, end, ids in joined]


def _right_padded(sequences: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    longest = max(ids.shape[1] for ids in sequences)
    padded = np.concatenate([np.pad(ids, ((0, 0), (0, longest - ids.shape[1]))) for ids in sequences])
    mask = np.array([[int(column < ids.shape[1]) for column in range(longest)] for ids in sequences])
    return padded, mask


def _thirds(length: int) -> list[int]:
    part = max(1, length // 3)
    return [part, part, length - 2 * part] if length > 2 * part else [length]


def _prompt_then_tokens(length: int) -> list[int]:
    decoded = min(_DECODED, length - 1)
    return [length - decoded] + [1] * decoded


def _has_int8_activations(manifest: Manifest) -> bool:
    """Whether products round their activations to int8."""
    if manifest.options.pure:
        return False
    containers = {tensor["container_bits"] for tensor in manifest.tensors.values()}
    return 8 in containers or (4 in containers and manifest.options.accuracy_level == 4)


def _advice(options: ExportOptions, routes: list[Route]) -> str:
    """A sentence on the cost of rounding activations to int8, and on how 4-bit products avoid it."""
    rounded, exact = routes[0].agreement, routes[-1].agreement
    cost = f"int8 activations: same token {rounded:.1%} of the time in prefill, {exact:.1%} with float32 ones"
    if options.accuracy_level == 1 or rounded >= exact:
        return cost
    return f"{cost}; where that matters, export 4-bit weights with --accuracy-level 1, which is slower"


def _check_source(manifest: Manifest, source: Source) -> None:
    exported = list(manifest.source["sha256"].values())
    if exported != [file_digest(file) for file in source.checkpoint.weight_files()]:
        raise CheckpointError(
            f"the folder was exported from {manifest.source['name']}, whose weights are not those of {source.path}; "
            "verify it against its own checkpoint"
        )
