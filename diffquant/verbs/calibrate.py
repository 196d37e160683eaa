"""The verb `calibrate`: finds static ranges of K, V and logits and writes them to a file."""

from pathlib import Path
from typing import TYPE_CHECKING

from diffquant.checkpoints.places import Places
from diffquant.recipe.rounding import to_sources
from diffquant.support.progress import Progress, progress_for
from diffquant.verbs import kinds
from diffquant.verbs.kinds import check_arguments, split_texts, to_paths
from diffquant.verbs.notes import choose_device, say_files_written

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

    Ranges are found on one half of the text, and the report measures them on the other half.

    Args:
        model: see `quantize`.
        output: file to write, such as scales.safetensors.
        targets: targets to calibrate: k, v, logits.
        observer: observer, which finds a range: absmax, mse, or percentile, such as percentile:99.9, which keeps
            that percentage of magnitudes; 99.99 by default.
        bits: bit width for observer mse and for the report.
        tokens: maximum number of tokens to read from the text.
        text: see `quantize`.
        window, dtype, device: see `search`.
        device_map, offload_folder: see `generate`.
        overwrite: replace the file if it exists.
        progress: function called with the windows done; by default a line on a terminal, one per minute in a log.

    Returns:
        For each layer and target, how well the ranges fit the other half of the text.

    Raises:
        DiffQuantError: the checkpoint, an option, the text or the output cannot be used.
    """
    from diffquant.calib.calibration.calibrate import calibrate as observe
    from diffquant.calib.calibration.observers import Observer
    from diffquant.checkpoints.ranges import check_ranges_output, write_ranges

    check_ranges_output(Path(output), overwrite)
    ranges, fits = observe(
        model,
        split_texts(targets),
        Observer.parse(observer, bits),
        text=to_sources(to_paths(text or ())),
        tokens=tokens,
        window=window,
        dtype=dtype,
        places=Places.of(device, device_map, offload_folder),
        device=choose_device(device),
        progress=progress or progress_for("calibrate"),
    )
    write_ranges(Path(output), ranges)
    say_files_written([output])
    return fits
