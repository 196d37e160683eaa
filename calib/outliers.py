"""Outliers of attention logits and hidden states by layer, as in the paper's Table 5, for any model.

Source: arXiv 2410.05258, section 3.7, Table 5: the largest magnitudes and the median over 0.4 M tokens.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from diffquant.calib.calibration.observers import QUANTILE_ERROR, MagnitudeHistogram
from diffquant.calib.outlier_result import HIDDEN, LOGITS, RANKS, MagnitudeStatistics, ModelOutliers, Outliers
from diffquant.checkpoints.placement import move_to_compute_device
from diffquant.checkpoints.places import OffloadPlan
from diffquant.checkpoints.source import Source, open_source
from diffquant.checkpoints.texts import load_text, text_digest
from diffquant.checkpoints.tokens import check_window, encode_windows
from diffquant.measure.sweep.result import model_names
from diffquant.model.causal import CausalModel
from diffquant.model.walk import BATCH_TOKENS, iterate_unmasked_logits, split_into_batches
from diffquant.quantization.loading import load
from diffquant.support.devices import resolve_device, resolve_dtype
from diffquant.support.files import check_distinct
from diffquant.support.installation import provenance, versions
from diffquant.support.progress import Progress, report_nothing


def find_outliers(
    models: Sequence[Path],
    *,
    text: Path | None = None,
    tokens: int = 400_000,
    window: int = 512,
    dtype: str = "auto",
    device: str = "auto",
    places: OffloadPlan | None = None,
    progress: Progress = report_nothing,
) -> Outliers:
    """Measure the largest and the median magnitudes of each model's attention logits and hidden states.

    Args:
        models: checkpoints to measure.
        text: file to read; the bundled text by default.
        tokens: largest number of tokens to read.
        window: context length in tokens.
        dtype: dtype of the models; logits are computed in float32.
        device: device to run on, unless `places` is given.
        places: devices, main memory and disk to spread each model over, or None to use one device.

    Raises:
        UsageError: a model is given twice, the text is shorter than a window, or there is no such device.
        NonFiniteError: a model computes NaN or infinity.
    """
    check_distinct(models)
    device = resolve_device(places.device if places else device)
    run_dtype = resolve_dtype(dtype, device)
    read = load_text(text)
    names = model_names(list(models))
    # A model takes minutes, so all are checked first.
    sources = [open_source(path) for path in models]
    for source in sources:
        check_window(window, source.architecture, source.tokenizer)

    def measure(name: str, source: Source) -> ModelOutliers:
        model = load(source, None, run_dtype, device, device_map=places)
        ids = encode_windows(model, source.tokenizer, read, window, tokens)
        magnitudes = measure_magnitudes(model, ids, progress=progress)
        generation = model.config.diff_spec.attention_name
        return ModelOutliers(name, generation, source.fingerprint, ids.numel(), *magnitudes)

    outliers_by_model = [measure(names[path], source) for path, source in zip(models, sources, strict=True)]
    settings = {
        "text": text_digest(read),
        "window": window,
        "dtype": str(run_dtype).removeprefix("torch."),
        "median_error": QUANTILE_ERROR,
        "versions": versions(),
    } | provenance()
    return Outliers(outliers_by_model, settings)


@torch.inference_mode()
def measure_magnitudes(
    model: CausalModel, ids: Tensor, batch_tokens: int = BATCH_TOKENS, progress: Progress = report_nothing
) -> tuple[list[dict[str, MagnitudeStatistics]], dict[str, MagnitudeStatistics]]:
    """Measure the magnitudes of each layer's attention logits and output, and those of all layers together.

    Args:
        ids: token ids [N, T] of N windows without padding.
        batch_tokens: largest number of tokens per forward pass.

    Returns:
        A list with the statistics of each layer, and the statistics over all layers, by kind: "logits" or "hidden".

    Raises:
        NonFiniteError: the model computes NaN or infinity.
    """
    runner = model.new_layer_runner(ids.shape[1])
    counted = [_by_kind() for _ in runner.layers]
    done = 0
    for batch in split_into_batches(ids, batch_tokens):
        state = runner.embed(batch)
        for layer, of_layer in zip(runner.layers, counted, strict=True):
            with move_to_compute_device(layer):
                projections = runner.project(layer, state)
            if projections is not None:
                q, k, _ = projections
                for first, logits in iterate_unmasked_logits(q, k, model.config.diff_spec):
                    of_layer[LOGITS].add_causal(logits, first, layer.window)
            state = runner.run_layer(layer, state)
            of_layer[HIDDEN].add(runner.hidden_states(state).float().abs())
        done += batch.numel()
        progress(done, ids.numel(), "reading")
    overall = _by_kind()
    for of_layer in counted:
        for kind, total in overall.items():
            total.merge(of_layer[kind])
    return [_summarize(of_layer) for of_layer in counted], _summarize(overall)


def _by_kind() -> dict[str, MagnitudeHistogram]:
    return {kind: MagnitudeHistogram(max(RANKS)) for kind in (LOGITS, HIDDEN)}


def _summarize(counted: dict[str, MagnitudeHistogram]) -> dict[str, MagnitudeStatistics]:
    return {kind: _magnitude(each) for kind, each in counted.items() if each.count}


def _magnitude(counted: MagnitudeHistogram) -> MagnitudeStatistics:
    count = counted.count
    top = {rank: float(counted.largest[rank - 1]) for rank in RANKS if rank <= count}
    return MagnitudeStatistics(count, top, counted.quantile(0.5))
