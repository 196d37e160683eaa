"""The verb `outliers`: finds the largest attention logits and hidden states of models."""

from pathlib import Path
from typing import TYPE_CHECKING

from diffquant.checkpoints.places import OffloadPlan
from diffquant.support.progress import Progress, progress_for
from diffquant.verbs import kinds
from diffquant.verbs.arguments import check_arguments, to_path, to_paths
from diffquant.verbs.notes import choose_device, say_files_written

if TYPE_CHECKING:
    from diffquant.calib.outlier_result import Outliers


@check_arguments
def outliers(
    models: kinds.Models,
    output: kinds.NewFolder | None = None,
    *,
    text: kinds.File | None = None,
    tokens: kinds.Tokens = 400_000,
    window: int = 512,
    dtype: kinds.Name = "auto",
    device: kinds.Name = "auto",
    device_map: kinds.DeviceMap | None = None,
    offload_folder: kinds.Folder | None = None,
    progress: Progress | None = None,
) -> "Outliers":
    """Find the largest attention logits and hidden states.

        diffquant outliers transformer diff -o outliers
        diffquant.outliers(["transformer", "diff"], "outliers")

    The table shows, over all layers of a model, the largest magnitudes and the median; the plot and outliers.json show
    them by layer.

    Args:
        models: see `sweep`.
        output: folder for outliers.json and its plot.
        text: UTF-8 text to read; by default the bundled text.
        tokens, window, dtype, device, device_map, offload_folder: see `calibrate`.
        progress: function called with the windows done; by default a line on a terminal, one per minute in a log.

    Returns:
        Magnitudes of logits and hidden states for each model and layer.

    Raises:
        DiffQuantError: a checkpoint, the text or the output cannot be used.
    """
    from diffquant.calib.outlier_result import FILES, write_outliers
    from diffquant.calib.outliers import find_outliers

    if output is not None:
        FILES.check(Path(output))
    found = find_outliers(
        to_paths(models),
        text=to_path(text),
        tokens=tokens,
        window=window,
        dtype=dtype,
        places=OffloadPlan.of(device, device_map, offload_folder),
        device=choose_device(device),
        progress=progress or progress_for("outliers"),
    )
    if output is not None:
        say_files_written(write_outliers(found, Path(output)))
    return found
