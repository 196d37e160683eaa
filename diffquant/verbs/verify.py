"""The verb `verify`: checks that an export computes the same as its checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING

from diffquant.support.progress import Progress, progress_for
from diffquant.verbs import kinds
from diffquant.verbs.arguments import check_arguments

if TYPE_CHECKING:
    from diffquant.onnx.verification.report import Verification


@check_arguments
def verify(
    folder: kinds.Exported,
    model: kinds.Model,
    *,
    tolerance: kinds.Tolerance | None = None,
    threads: kinds.Threads = 0,
    device: kinds.Name = "auto",
    progress: Progress | None = None,
) -> "Verification":
    """Check that an export computes the same as its checkpoint.

        diffquant verify model-onnx model
        print(diffquant.verify("model-onnx", "model"))

    The exit code is 4 if an output differs by more than the tolerance.

    Args:
        model: see `quantize`.
        tolerance: largest allowed relative RMS error of logits; by default the largest that rounding explains.
        folder, threads, device: see `run`.
        progress: function called with the number of finished comparisons; by default a line on a terminal, one per
            minute in a log.

    Raises:
        CheckpointError: the folder was edited after export, was made from another checkpoint, or cannot run.
        ToleranceError: an output differs by more than the tolerance; its `result` has all comparisons.
        MissingDependencyError: ONNX Runtime is not installed, or cannot use the device.
    """
    from diffquant.onnx import check_installed

    check_installed()
    from diffquant.onnx.verifier import verify as compare

    shown = progress or progress_for("verify")
    return compare(Path(folder), model, tolerance, threads, device, shown)
