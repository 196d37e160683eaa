"""The verb `calibrate`: static ranges of K, V and logits, or the importance of weights' inputs, in a file."""

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from diffquant.checkpoints.places import Places
from diffquant.errors import UsageError
from diffquant.recipe.rounding import paths_of
from diffquant.support.names import option_name
from diffquant.support.progress import Progress, progress_for
from diffquant.verbs import kinds
from diffquant.verbs.kinds import check_arguments, paths, texts
from diffquant.verbs.notes import chosen_device, wrote

if TYPE_CHECKING:
    from diffquant.calib.calibration.calibrate import Fit
    from diffquant.checkpoints.imatrix import Imatrix

_Made = TypeVar("_Made")


@check_arguments
def calibrate(
    model: kinds.Model,
    output: kinds.NewFile,
    *,
    targets: kinds.Targets = "k,v,logits",
    observer: kinds.Name = "absmax",
    percentile: float = 99.99,
    bits: int = 8,
    text: kinds.Texts | None = None,
    tokens: kinds.Tokens = 16384,
    window: int = 512,
    dtype: kinds.Name = "float32",
    device: kinds.Name = "auto",
    device_map: kinds.DeviceMap | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    offload_folder: kinds.Folder | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> "list[Fit] | Imatrix":
    """Find static ranges of keys, values and logits, or an importance matrix.

        diffquant calibrate model -o scales.safetensors
        diffquant calibrate model -o imatrix.gguf
        diffquant.calibrate("model", "scales.safetensors", targets="k,v")

    Ranges come from one half of the text, and the report is about the other half. An importance matrix (imatrix) is
    llama.cpp's file of the mean square of each weight's input channels, which `quantize --imatrix` reads.

    Args:
        model: as `quantize` takes it.
        output: file to write: scales.safetensors for ranges, or imatrix.gguf for an importance matrix.
        targets: what to find ranges of: k, v, logits.
        observer: observer, which finds a range: absmax, percentile or mse.
        percentile: percentage of magnitudes that the percentile observer does not clip.
        bits: width that the mse observer clips for, and that the report is about.
        tokens: largest number of tokens to read from the text.
        text: as `quantize` takes it.
        window, dtype, device: as `search` takes them.
        device_map, offload_folder: as `generate` takes them.
        max_memory: most bytes of each place, as `load` takes it.
        overwrite: replace the file if it exists.
        progress: function called with the windows done; by default a line on a terminal, one per minute in a log.

    Returns:
        How the ranges fit the half that was not observed, by layer and target; or the importance matrix.

    Raises:
        DiffQuantError: the checkpoint, the options, the text or the output do not fit.
    """
    from diffquant.calib.calibration.calibrate import calibrate as observe
    from diffquant.calib.calibration.importance import write_importance
    from diffquant.calib.calibration.observers import Observer
    from diffquant.checkpoints.gguf import is_own_gguf
    from diffquant.checkpoints.opening import is_gguf
    from diffquant.checkpoints.ranges import check_calibrated_output, write_ranges

    def run(measure: Callable[..., _Made], *arguments: object) -> _Made:
        return measure(
            model,
            *arguments,
            text=paths_of(paths(text or ())),
            tokens=tokens,
            window=window,
            dtype=dtype,
            places=Places.of(device, device_map, offload_folder, max_memory),
            device=chosen_device(device),
            progress=progress or progress_for("calibrate"),
        )

    file = Path(output)
    if is_gguf(file):
        _refuse_settings_of_ranges(targets=targets, observer=observer, percentile=percentile, bits=bits)
        check_calibrated_output(file, overwrite, partial(is_own_gguf, kind="imatrix"))
        imatrix = run(write_importance, file)
        wrote([output])
        return imatrix
    check_calibrated_output(file, overwrite)
    ranges, fits = run(observe, texts(targets), Observer(observer, percentile, bits))
    write_ranges(file, ranges)
    wrote([output])
    return fits


def _refuse_settings_of_ranges(**settings: object) -> None:
    defaults = signature(calibrate).parameters
    if given := [option_name(name) for name, value in settings.items() if value != defaults[name].default]:
        raise UsageError(
            f"{' and '.join(given)} set how ranges are found, and a .gguf output is an importance matrix: leave them "
            "out, or write ranges, such as scales.safetensors"
        )
