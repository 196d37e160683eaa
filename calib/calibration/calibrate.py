"""The verb `calibrate`: ranges of K, V and logits from one half of a text, reported on the other half."""

from collections.abc import Sequence
from pathlib import Path

from diffquant.calib.calibration.fit import Fit, measure_fit
from diffquant.calib.calibration.observe import BATCH_TOKENS, observe_ranges, to_ranges
from diffquant.calib.calibration.observers import Observer
from diffquant.errors import UsageError
from diffquant.loading import load
from diffquant.recipe import Recipe
from diffquant.recipe.targets import CALIBRATED_TARGETS
from diffquant.source.places import Places
from diffquant.source.ranges import Ranges
from diffquant.source.source import Source, open_source
from diffquant.support.devices import resolve_device, resolve_dtype
from diffquant.support.progress import Progress, silent
from diffquant.text.corpus import load_text
from diffquant.text.tokens import token_windows


def calibrate(
    path: Path | Source,
    targets: Sequence[str] = CALIBRATED_TARGETS,
    observer: Observer | None = None,
    *,
    text: Path | None = None,
    tokens: int = 16384,
    window: int = 512,
    dtype: str = "float32",
    device: str = "auto",
    places: Places | None = None,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress = silent,
) -> tuple[Ranges, list[Fit]]:
    """Ranges from the first half of the text's windows, and how they fit the second half.

    Args:
        targets: activations to find ranges of, among `CALIBRATED_TARGETS`.
        observer: rule from magnitudes to ranges; absmax by default.
        text: file whose one half is observed and whose other half is reported on; the prose that ships by default.
        tokens: most tokens of the text, over both halves.
        window: tokens that the model sees at once.
        dtype: dtype of the model that is observed.
        device: device that it runs on, if it is on one.
        places: places that it is spread over, or None to use one device.
        batch_tokens: most tokens of one pass.

    Raises:
        UsageError: an unknown target or none, a text of fewer than two windows, or a device that is not there.
        NonFiniteError: the model computes NaN or infinity.
    """
    _check_targets(targets)
    observer = observer or Observer()
    device = resolve_device(places.device if places else device)
    read = load_text(text)
    source = open_source(path)
    source.transformer("calibrate")
    tokenizer = source.tokenizer
    model = load(source, Recipe(), resolve_dtype(dtype, device), device, device_map=places)
    ids = token_windows(model, tokenizer, read, window, tokens)
    if len(ids) < 2:
        raise UsageError(
            f"the text holds one window of {window} tokens; two are needed, to calibrate on and to report on"
        )
    observed, held_out = ids.tensor_split([(len(ids) + 1) // 2])
    tensors = observe_ranges(model, observed, targets, observer, batch_tokens, progress)
    fits = measure_fit(model, held_out, tensors, observer.bits, batch_tokens, progress)
    return to_ranges(source, model, observed, read, observer, tensors), fits


def _check_targets(targets: Sequence[str]) -> None:
    known = ", ".join(CALIBRATED_TARGETS)
    if "hidden" in targets:
        raise UsageError(f"no scheme quantizes hidden states, so they have no ranges; calibrate {known}")
    unknown = [target for target in targets if target not in CALIBRATED_TARGETS]
    if unknown or not targets:
        raise UsageError(f"unknown target {', '.join(map(repr, unknown))}; known are {known}")
