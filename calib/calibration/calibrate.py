"""The verb `calibrate`: ranges of K, V and logits from one half of a text, reported on the other half."""

from dataclasses import dataclass, field, replace
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


@dataclass(frozen=True)
class CalibrationOptions:
    """Options of a run of `calibrate`.

    Attributes:
        targets: activations to find ranges of, among `CALIBRATED_TARGETS`.
        observer: rule from magnitudes to ranges.
        text: file whose one half is observed and whose other half is reported on; the prose that ships by default.
        tokens: most tokens of the text, over both halves.
        window: tokens that the model sees at once.
        dtype: dtype of the model that is observed.
        device: device that it runs on, if it is on one.
        places: places that it is spread over, or None to use one device.
        batch_tokens: most tokens of one pass.
    """

    targets: tuple[str, ...] = CALIBRATED_TARGETS
    observer: Observer = field(default_factory=Observer)
    text: Path | None = None
    tokens: int = 16384
    window: int = 512
    dtype: str = "float32"
    device: str = "auto"
    places: Places | None = None
    batch_tokens: int = BATCH_TOKENS

    def __post_init__(self) -> None:
        known = ", ".join(CALIBRATED_TARGETS)
        if "hidden" in self.targets:
            raise UsageError(f"no scheme quantizes hidden states, so they have no ranges; calibrate {known}")
        unknown = [target for target in self.targets if target not in CALIBRATED_TARGETS]
        if unknown or not self.targets:
            raise UsageError(f"unknown target {', '.join(map(repr, unknown))}; known are {known}")


def calibrate(
    path: Path | Source, options: CalibrationOptions, progress: Progress = silent
) -> tuple[Ranges, list[Fit]]:
    """Ranges from the first half of the text's windows, and how they fit the second half.

    Raises:
        UsageError: a text of fewer than two windows, or a device that is not there.
        NonFiniteError: the model computes NaN or infinity.
    """
    options = replace(options, device=resolve_device(options.places.device if options.places else options.device))
    text = load_text(options.text)
    source = open_source(path)
    source.transformer("calibrate")
    tokenizer = source.tokenizer
    dtype = resolve_dtype(options.dtype, options.device)
    model = load(source, Recipe(), dtype, options.device, device_map=options.places)
    ids = token_windows(model, tokenizer, text, options.window, options.tokens)
    if len(ids) < 2:
        raise UsageError(
            f"the text holds one window of {options.window} tokens; two are needed, to calibrate on and to report on"
        )
    observed, held_out = ids.tensor_split([(len(ids) + 1) // 2])
    observer = options.observer
    tensors = observe_ranges(model, observed, options.targets, observer, options.batch_tokens, progress)
    fits = measure_fit(model, held_out, tensors, observer.bits, options.batch_tokens, progress)
    return to_ranges(source, model, observed, text, observer, tensors), fits
