"""The verb `calibrate`: finds static ranges of K, V and logits, or an importance matrix, and writes a file."""

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from diffquant.checkpoints.places import OffloadPlan
from diffquant.errors import UsageError
from diffquant.recipe.rounding import to_calibration_paths
from diffquant.support.names import option_name
from diffquant.support.progress import Progress, progress_for
from diffquant.verbs import kinds
from diffquant.verbs.arguments import check_arguments, split_texts, to_paths
from diffquant.verbs.notes import choose_device, say_files_written

if TYPE_CHECKING:
    from diffquant.calib.calibration.calibrate import RangeQuality
    from diffquant.checkpoints.imatrix import Imatrix

_Made = TypeVar("_Made")


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
) -> "list[RangeQuality] | Imatrix":
    """Measure static ranges, or an importance matrix, on a text.

        diffquant calibrate model -o scales.safetensors
        diffquant calibrate model -o imatrix.gguf
        diffquant.calibrate("model", "scales.safetensors", targets="k,v")

    Ranges are found on one half of the text, and the report measures them on the other half. An importance matrix
    (imatrix) is llama.cpp's file of the mean square of each weight's input channels, which `quantize --imatrix` reads.

    Args:
        model: see `quantize`.
        output: file to write: scales.safetensors for ranges, or imatrix.gguf for an importance matrix.
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
        For each layer and target, how well the ranges fit the other half of the text; or the importance matrix.

    Raises:
        DiffQuantError: the checkpoint, an option, the text or the output cannot be used.
    """
    from diffquant.calib.calibration.calibrate import calibrate as observe
    from diffquant.calib.calibration.importance import write_importance
    from diffquant.calib.calibration.observers import Observer
    from diffquant.checkpoints.gguf import is_own_gguf
    from diffquant.checkpoints.location import is_gguf
    from diffquant.checkpoints.ranges import check_calibrated_output, is_own_ranges, write_ranges

    def run(measure: Callable[..., _Made], *arguments: object) -> _Made:
        return measure(
            model,
            *arguments,
            text=to_calibration_paths(to_paths(text or ())),
            tokens=tokens,
            window=window,
            dtype=dtype,
            places=OffloadPlan.of(device, device_map, offload_folder),
            device=choose_device(device),
            progress=progress or progress_for("calibrate"),
        )

    file = Path(output)
    if is_gguf(file):
        _refuse_settings_of_ranges(targets=targets, observer=observer, bits=bits)
        check_calibrated_output(file, overwrite, is_own_gguf(file, "imatrix"))
        imatrix = run(write_importance, file)
        say_files_written([output])
        return imatrix
    if file.suffix == ".dat":  # as llama.cpp once named an importance matrix
        raise UsageError(f"{file}: write an importance matrix as {file.stem}.gguf, or ranges as scales.safetensors")
    check_calibrated_output(file, overwrite, is_own_ranges(file))
    ranges, fits = run(observe, split_texts(targets), Observer.parse(observer, bits))
    write_ranges(file, ranges)
    say_files_written([output])
    return fits


def _refuse_settings_of_ranges(**settings: object) -> None:
    defaults = signature(calibrate).parameters
    if given := [option_name(name) for name, value in settings.items() if value != defaults[name].default]:
        raise UsageError(
            f"{' and '.join(given)} set how ranges are found, but a .gguf output is an importance matrix: leave them "
            "out, or write ranges, such as scales.safetensors"
        )
