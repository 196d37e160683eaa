"""File names of an exported folder; this module does not import onnx, which recognizing a folder must not need."""

from dataclasses import dataclass
from pathlib import Path

from diffquant.checkpoints.side_files import POINTER, is_lfs_pointer_file
from diffquant.errors import CheckpointError

MODEL_FILE, DATA_FILE = "model.onnx", "model.onnx.data"
# Calibrated ranges of a quantized cache, as `diffquant calibrate` writes them too.
RANGES_FILE = "kv_ranges.safetensors"


@dataclass(frozen=True)
class Layout:
    """Paths of the model's files, relative to an exported folder.

    Attributes:
        model: path of the graph.
        data: path of the external data, in the same subfolder.
    """

    model: str
    data: str

    @property
    def data_name(self) -> str:
        """Name of the data file without its folder, as in the graph."""
        return Path(self.data).name


PLAIN = Layout(MODEL_FILE, DATA_FILE)
# The paths that transformers.js and optimum expect.
PORTABLE = Layout("onnx/model.onnx", "onnx/model.onnx_data")


def check_exported(folder: Path) -> None:
    """Check that a path leads to an exported folder.

    Raises:
        CheckpointError: the path is not an exported folder, or a file is only a Git LFS pointer; the message suggests
            what to do.
    """
    if model_file(folder).is_file():
        layout = layout_of(folder)
        for name in (layout.model, layout.data):
            if (folder / name).is_file() and is_lfs_pointer_file(folder / name):
                raise CheckpointError(f"{folder / name} {POINTER}")
        return
    if not folder.exists():
        raise CheckpointError(f"there is no {folder}; create it from a checkpoint with `diffquant export`")
    if folder.suffix == ".onnx" and folder.is_file():
        raise CheckpointError(f"{folder} is a file; give the folder that it is in, {folder.parent}")
    if folder.suffix.lower() == ".gguf" or (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} is a checkpoint, not an export: `diffquant export` makes one from it, and `diffquant generate` "
            "runs the checkpoint directly"
        )
    raise CheckpointError(f"{folder} has no {MODEL_FILE}; give a folder that `diffquant export` wrote")


def layout_of(folder: Path) -> Layout:
    """Return the layout of an exported folder, found by file names only."""
    return PORTABLE if (folder / PORTABLE.model).is_file() else PLAIN


def model_file(folder: Path) -> Path:
    """Return the path of an exported folder's graph."""
    return folder / layout_of(folder).model
