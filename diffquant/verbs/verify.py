"""The verb `verify`: proof that an export computes what its checkpoint does."""

from pathlib import Path
from typing import TYPE_CHECKING

from diffquant.support.progress import Progress, progress_for
from diffquant.verbs import kinds
from diffquant.verbs.kinds import check_arguments

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
    """Prove that an export computes what its checkpoint does.

        diffquant verify model-onnx model
        print(diffquant.verify("model-onnx", "model"))

    The exit code is 4 where it does not.

    Args:
        model: as `quantize` takes it.
        tolerance: largest relative RMS error of logits; by default what rounding explains.
        folder, threads, device: as `run` takes them.
        progress: function called with the routes compared; by default a line on a terminal, one per minute in a log.

    Raises:
        CheckpointError: the folder was edited after export, or made from another checkpoint, or cannot run.
        ToleranceError: something differs by more than rounding explains; its `result` has all that was compared.
        MissingDependencyError: ONNX Runtime is not installed, or cannot use the device.
    """
    from diffquant.onnx import require

    require()
    from diffquant.onnx.verifier import verify as compare

    shown = progress or progress_for("verify")
    return compare(Path(folder), model, tolerance, threads, device, shown)
