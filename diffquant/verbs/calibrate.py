"""The verb `calibrate`: static ranges of K, V and logits, in a file."""

from pathlib import Path
from typing import TYPE_CHECKING

from diffquant.checkpoints.places import Places
from diffquant.recipe.rounding import paths_of
from diffquant.support.progress import Progress, progress_for
from diffquant.verbs import kinds
from diffquant.verbs.kinds import check_arguments, paths, texts
from diffquant.verbs.notes import chosen_device, wrote

if TYPE_CHECKING:
    from diffquant.calib.calibration.calibrate import Fit


@check_arguments
def calibrate(
    model: kinds.Model,
    output: kinds.NewFile,
    *,
    targets: kinds.Targets = "k,v,logits",
    observer: kinds.Name = "absmax",
    bits: int = 8,
    text: kinds.Texts | None = None,
    tokens: kinds.Tokens = 16384,
    window: int = 512,
    dtype: kinds.Name = "float32",
    device: kinds.Name = "auto",
    device_map: kinds.DeviceMap | None = None,
    offload_folder: kinds.Folder | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> "list[Fit]":
    """Find static ranges of keys, values and logits on a text.

        diffquant calibrate model -o scales.safetensors
        diffquant.calibrate("model", "scales.safetensors", targets="k,v")

    Ranges come from one half of the text, and the report is about the other half.

    Args:
        model: as `quantize` takes it.
        output: file to write, such as scales.safetensors.
        targets: what to find ranges of: k, v, logits.
        observer: observer, which finds a range: absmax, mse, or percentile, such as percentile:99.9, which keeps
            that percentage of magnitudes; 99.99 by default.
        bits: width that the mse observer clips for, and that the report is about.
        tokens: largest number of tokens to read from the text.
        text: as `quantize` takes it.
        window, dtype, device: as `search` takes them.
        device_map, offload_folder: as `generate` takes them.
        overwrite: replace the file if it exists.
        progress: function called with the windows done; by default a line on a terminal, one per minute in a log.

    Returns:
        How the ranges fit the half that was not observed, by layer and target.

    Raises:
        DiffQuantError: the checkpoint, the options, the text or the output do not fit.
    """
    from diffquant.calib.calibration.calibrate import calibrate as observe
    from diffquant.calib.calibration.observers import Observer
    from diffquant.checkpoints.ranges import check_ranges_output, write_ranges

    check_ranges_output(Path(output), overwrite)
    ranges, fits = observe(
        model,
        texts(targets),
        Observer.parse(observer, bits),
        text=paths_of(paths(text or ())),
        tokens=tokens,
        window=window,
        dtype=dtype,
        places=Places.of(device, device_map, offload_folder),
        device=chosen_device(device),
        progress=progress or progress_for("calibrate"),
    )
    write_ranges(Path(output), ranges)
    wrote([output])
    return fits
