"""Outliers of attention logits and hidden states, layer by layer: Table 5 of the paper for any model.

Source: arXiv 2410.05258, section 3.7, Table 5: the largest magnitudes and the median over 0.4 M tokens.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from diffquant.calib.analysis.outlier_result import HIDDEN, LOGITS, RANKS, Magnitude, ModelOutliers, Outliers
from diffquant.calib.statistics import QUANTILE_ERROR, Magnitudes
from diffquant.loading import load
from diffquant.model.causal import CausalModel
from diffquant.model.walk import batches, causal_logits
from diffquant.source.placement import at_hand
from diffquant.source.places import Places
from diffquant.source.source import Source, open_source
from diffquant.support.code import provenance
from diffquant.support.devices import resolve_device, resolve_dtype
from diffquant.support.files import check_distinct
from diffquant.support.progress import Progress, silent
from diffquant.support.versions import versions
from diffquant.sweep.result import model_names
from diffquant.text.corpus import load_text, text_digest
from diffquant.text.tokens import check_window, token_windows


def find_outliers(
    models: Sequence[Path],
    *,
    text: Path | None = None,
    tokens: int = 400_000,
    window: int = 1024,
    dtype: str = "auto",
    device: str = "auto",
    places: Places | None = None,
    batch_tokens: int = 4096,
    progress: Progress = silent,
) -> Outliers:
    """Measure the outliers of every model, one model after the other.

    Args:
        text: file that is read; the prose that ships by default.
        tokens: most tokens of the text.
        window: tokens that a model sees at once.
        dtype: dtype of the models; logits are multiplied in float32.
        device: device that they run on, if they are on one.
        places: places that they are spread over, or None to use one device.
        batch_tokens: most tokens of one pass.

    Raises:
        UsageError: a model named twice, a text shorter than a window, or a device that is not there.
        NonFiniteError: a model computes NaN or infinity.
    """
    check_distinct(models)
    device = resolve_device(places.device if places else device)
    run_dtype = resolve_dtype(dtype, device)
    read = load_text(text)
    names = model_names(list(models))
    # A model takes minutes: what another lacks is told before.
    sources = [open_source(path) for path in models]
    for source in sources:
        check_window(window, source.architecture, source.tokenizer)

    def measure(name: str, source: Source) -> ModelOutliers:
        model = load(source, None, run_dtype, device, device_map=places)
        ids = token_windows(model, source.tokenizer, read, window, tokens)
        magnitudes = measure_magnitudes(model, ids, batch_tokens, progress)
        generation = model.config.diff_spec.generation
        return ModelOutliers(name, generation, source.fingerprint, ids.numel(), *magnitudes)

    outliers_by_model = [measure(names[path], source) for path, source in zip(models, sources, strict=True)]
    settings = {
        "text": text_digest(read),
        "window": window,
        "dtype": str(run_dtype).removeprefix("torch."),
        "median_error": QUANTILE_ERROR,
        "versions": versions(),
    } | provenance(__name__)
    return Outliers(outliers_by_model, settings)


@torch.inference_mode()
def measure_magnitudes(
    model: CausalModel, ids: Tensor, batch_tokens: int = 4096, progress: Progress = silent
) -> tuple[list[dict[str, Magnitude]], dict[str, Magnitude]]:
    """Magnitudes of each layer, and of all of them together.

    Args:
        ids: [N, T] windows without padding.

    Raises:
        NonFiniteError: the model computes NaN or infinity.
    """
    walk = model.walk(ids.shape[1])
    counted = [_by_kind() for _ in walk.layers]
    done = 0
    for batch in batches(ids, batch_tokens):
        state = walk.embed(batch)
        for layer, of_layer in zip(walk.layers, counted, strict=True):
            with at_hand(layer):
                projections = walk.project(layer, state)
            if projections is not None:
                q, k, _ = projections
                for first, logits in causal_logits(q, k, model.config.diff_spec):
                    of_layer[LOGITS].add_causal(logits, first, walk.window(layer))
            state = walk.run(layer, state)
            of_layer[HIDDEN].add(walk.hidden(state).float().abs())
        done += batch.numel()
        progress(done, ids.numel(), "reading")
    overall = _by_kind()
    for of_layer in counted:
        for kind, total in overall.items():
            total.merge(of_layer[kind])
    return [_told(of_layer) for of_layer in counted], _told(overall)


def _by_kind() -> dict[str, Magnitudes]:
    return {kind: Magnitudes(max(RANKS)) for kind in (LOGITS, HIDDEN)}


def _told(counted: dict[str, Magnitudes]) -> dict[str, Magnitude]:
    return {kind: _magnitude(each) for kind, each in counted.items() if each.count}


def _magnitude(counted: Magnitudes) -> Magnitude:
    count = counted.count
    top = {rank: float(counted.largest[rank - 1]) for rank in RANKS if rank <= count}
    return Magnitude(count, top, counted.quantile(0.5))
