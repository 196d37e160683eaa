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
        """Where the model first leaves its tolerance."""
        tolerance = self.routes[0].tolerance
        layer = next((i for i, error in enumerate(self.layers) if not error <= tolerance), None)
        if layer is not None:
            return f"diverges first in layer {layer} (relative RMS error {self.layers[layer]:.1e})"
        wrong = ", ".join(f"{route.name} ({route.error:.1e})" for route in self.routes if not route.passed)
        return f"every layer's output is close in prefill; these logits are not: {wrong}"


def verify(folder: Path, source: Path | str | Source, tolerance: float | None = None, threads: int = 0) -> Verification:
    """Compare an exported folder with the checkpoint it was made from.

    Args:
        tolerance: relative RMS error of logits; by default what the export's precision explains.
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
    verification = _compare(folder, reference, manifest, sequences(source, reference), tolerance, threads)
    if not verification.passed:
        raise ToleranceError(f"{folder} does not compute what {source.path} does:\n{verification}")
    return verification


def default_tolerance(options: ExportOptions) -> float:
    """Relative RMS error that the export's types explain, int8 activations apart."""
    if options.dtype == "float16":
        return _HALF
    return _ROUNDED if options.kv_bits < 16 or options.logits.quantizes else _FLOAT


def sequences(source: Source, reference: Reference) -> list[np.ndarray]:
    """Three sequences of token ids of different length: prose where there is a tokenizer, else random."""
    config = reference.model.config
    longest = min(_LENGTH, config.max_position_embeddings - 1)
    lengths = [longest, max(1, longest // 2), max(1, longest // 5)]
    try:
        text = source.tokenizer(books_text()[: 20 * longest])["input_ids"]
    except CheckpointError:
        text = []
    if len(text) < 2 * longest or max(text) >= config.vocab_size:
        text = np.random.default_rng(0).integers(0, config.vocab_size, 2 * longest).tolist()
    return [np.array([text[i * 7 : i * 7 + length]], np.int64) for i, length in enumerate(lengths)]


def _compare(
    folder: Path,
    reference: Reference,
    manifest: Manifest,
    texts: list[np.ndarray],
    tolerance: float | None,
    threads: int,
) -> Verification:
    names = tuple(LAYER_OUTPUT.format(layer=i) for i in range(reference.model.config.num_hidden_layers))
    model = OnnxModel(folder, threads, extra_outputs=names)
    expected = [reference.run(text) for text in texts]
    (_, *layers), _ = model.run(texts[0], np.ones_like(texts[0]), model.empty_cache(1), ("logits", *names))
    wanted = [logits for logits, _ in expected]
    exact = tolerance or default_tolerance(manifest.options)
    rounds = _has_int8_activations(manifest)
    allowed = tolerance or (_INT8 if rounds else exact)
    routes = [_compared(name, run, texts, wanted, allowed) for name, run in _routes(model, manifest.options)]
    if rounds:
        # Without the rounding of activations nothing excuses a difference: this proves codes and scales.
        twin = OnnxModel(folder, threads, accuracy_level=1)
        routes.append(
            _compared(_EXACT, lambda texts: [_in_chunks(twin, texts[0], [texts[0].shape[1]])], texts, wanted, exact)
        )
    layer_errors = tuple(relative_rms(got, want) for got, want in zip(layers, expected[0][1], strict=True))
    return Verification(folder, tuple(routes), layer_errors, _advice(manifest.options, routes) if rounds else "")


# From sequences to the logits of each.
Runner = Callable[[list[np.ndarray]], list[np.ndarray]]


def _routes(model: OnnxModel, options: ExportOptions) -> Iterator[tuple[str, Runner]]:
    """Every way to run the model that must give the logits of a whole sequence."""
    yield "prefill", _prefill(model)
    yield "padded batch", lambda texts: _padded(model, texts)
    # A logit scale that spans rows spans those of a call: chunks have scales of their own.
    if model.cache is not None and options.logits.granularity in ("", "row"):
        yield "chunked prefill", lambda texts: [_in_chunks(model, texts[0], _thirds(texts[0].shape[1]))]
        yield "decode", lambda texts: [_in_chunks(model, texts[0], _prompt_then_tokens(texts[0].shape[1]))]
        yield "batch decode", lambda texts: _padded_then_decoded(model, texts)


def _compared(name: str, run: Runner, texts: list[np.ndarray], wanted: list[np.ndarray], tolerance: float) -> Route:
    got = [logits.astype(np.float32) for logits in run(texts)]
    pairs = list(zip(got, wanted, strict=False))
    left, right = (np.concatenate([pair[i].reshape(-1, pair[i].shape[-1]) for pair in pairs]) for i in (0, 1))
    same = float((left.argmax(-1) == right.argmax(-1)).mean())
    return Route(name, relative_rms(left, right), float(np.abs(left - right).max()), same, tolerance)


def relative_rms(got: np.ndarray, wanted: np.ndarray) -> float:
    """Root mean square of the difference over that of `wanted` about its mean along the last axis."""
    exact = wanted.astype(np.float64)
    spread = exact - exact.mean(-1, keepdims=True)
    return float(np.sqrt(np.square(got - exact).mean() / max(np.square(spread).mean(), 1e-30)))


def _prefill(model: OnnxModel) -> Runner:
    return lambda texts: [_in_chunks(model, texts[0], [texts[0].shape[1]])]


def _in_chunks(model: OnnxModel, ids: np.ndarray, lengths: list[int]) -> np.ndarray:
    cache, start, parts = model.empty_cache(1), 0, []
    for length in lengths:
        chunk = ids[:, start : start + length]
        start += length
        (logits,), cache = model.run(chunk, np.ones((1, start), np.int64), cache)
        parts.append(logits)
    return np.concatenate(parts, 1)


def _padded(model: OnnxModel, texts: list[np.ndarray]) -> list[np.ndarray]:
    (logits,), _ = model.run(*_right_padded(texts), model.empty_cache(len(texts)))
    return [row[None, : text.shape[1]] for row, text in zip(logits, texts, strict=True)]


def _padded_then_decoded(model: OnnxModel, texts: list[np.ndarray]) -> list[np.ndarray]:
    """All but the last token of each as a padded batch, then the last ones in one step."""
    ids, mask = _right_padded([text[:, :-1] for text in texts])
    (logits,), cache = model.run(ids, mask, model.empty_cache(len(texts)))
    last = np.concatenate([text[:, -1:] for text in texts])
    longer = np.pad(mask, ((0, 0), (0, 1)))
    for row, text in zip(longer, texts, strict=True):
        row[text.shape[1] - 1] = 1
    (final,), _ = model.run(last, longer, cache)
    joined = zip(logits, final, texts, strict=True)
    return [np.concatenate([row[: text.shape[1] - 1], end])[None] for row, end, text in joined]


def _right_padded(texts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    longest = max(text.shape[1] for text in texts)
    ids = np.concatenate([np.pad(text, ((0, 0), (0, longest - text.shape[1]))) for text in texts])
    mask = np.array([[int(column < text.shape[1]) for column in range(longest)] for text in texts])
    return ids, mask


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
    stored = {tensor["stored_bits"] for tensor in manifest.tensors.values()}
    return 8 in stored or (4 in stored and manifest.options.accuracy_level == 4)


def _advice(options: ExportOptions, routes: list[Route]) -> str:
    """What rounding activations to int8 costs, and how to keep 4-bit products from it."""
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
