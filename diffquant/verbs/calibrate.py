"""The verb `calibrate`: static ranges of K, V and logits, in a file."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from diffquant.calib.calibration.calibrate import CalibrationOptions
from diffquant.calib.calibration.calibrate import calibrate as observe
from diffquant.calib.calibration.fit import Fit
from diffquant.calib.calibration.observers import Observer
from diffquant.recipe import CALIBRATED_TARGETS
from diffquant.source.places import DeviceMap, Places
from diffquant.source.ranges import check_ranges_output, write_ranges
from diffquant.source.source import Source
from diffquant.support.progress import Progress, progress_for
from diffquant.verbs.arguments import path_or_none, texts


def calibrate(
    model: Path | str | Source,
    output: Path | str,
    *,
    targets: str | Sequence[str] = CALIBRATED_TARGETS,
    observer: str = "absmax",
    percentile: float = 99.99,
    bits: int = 8,
    text: Path | str | None = None,
    tokens: int = 16384,
    window: int = 512,
    dtype: str = "float32",
    device: str = "auto",
    device_map: DeviceMap | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    offload_folder: Path | str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> list[Fit]:
    """Find static ranges of K, V and logits on half of a text, and report on the other half.

        diffquant.calibrate("checkpoint", "scales.safetensors", targets="k,v")
        model = diffquant.load("checkpoint", {"kv": "8:static"}, scales="scales.safetensors")

    Args:
        model: checkpoint to observe.
        output: file to write.
        targets: names among k, v and logits.
        observer: rule from magnitudes to ranges: "absmax", "percentile" or "mse".
        percentile: percentage of magnitudes that are not clipped, for "percentile".
        bits: width that "mse" clips for and the report is about.
        text: file to read; prose ships.
        tokens: most tokens of the text, over both halves.
        window: tokens that the model sees at once.
        dtype: name of the model's dtype.
        device: device that it runs on; "auto" is CUDA where there is one, else the processor.
        device_map, max_memory, offload_folder: places of a model that is larger than one device, as `load` takes them.
        overwrite: replace the file if it exists.
        progress: function called with the windows done; by default a line on a terminal, one per minute in a log.

    Returns:
        How the ranges fit the half that was not observed, by layer and target.

    Raises:
        DiffQuantError: the checkpoint, the options, the text or the output do not fit.
    """
    check_ranges_output(Path(output), overwrite)
    rule = Observer(observer, percentile, bits)
    places = Places.of(device, device_map, offload_folder, max_memory)
    options = CalibrationOptions(texts(targets), rule, path_or_none(text), tokens, window, dtype, device, places)
    path = model if isinstance(model, Source) else Path(model)
    ranges, fits = observe(path, options, progress or progress_for("calibrate"))
    write_ranges(Path(output), ranges)
    return fits
