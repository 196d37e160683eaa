"""Names of an exported folder's files. They stand alone: recognizing such a folder must not import onnx."""

from dataclasses import dataclass
from pathlib import Path

from diffquant.errors import CheckpointError
from diffquant.formats.json_object import POINTER, holds_pointer

MODEL_FILE, DATA_FILE = "model.onnx", "model.onnx.data"
# What calibration found for a quantized cache; `diffquant calibrate` writes such files, too.
RANGES_FILE = "kv_ranges.safetensors"


@dataclass(frozen=True)
class Layout:
    """Where an exported folder has its model.

    Attributes:
        model: path of the graph in the folder.
        data: path of its data, beside it.
    """

    model: str
    data: str

    @property
    def data_name(self) -> str:
        """The name by which the graph refers to its data."""
        return Path(self.data).name


PLAIN = Layout(MODEL_FILE, DATA_FILE)
# Where transformers.js and optimum look.
PORTABLE = Layout("onnx/model.onnx", "onnx/model.onnx_data")


def check_exported(folder: Path) -> None:
    """Check that a path leads to an exported folder.

    Raises:
        CheckpointError: it does not.
    """
    if model_file(folder).is_file():
        layout = layout_of(folder)
        for name in (layout.model, layout.data):
            if (folder / name).is_file() and holds_pointer(folder / name):
                raise CheckpointError(f"{folder / name} {POINTER}")
        return
    if not folder.exists():
        raise CheckpointError(f"there is no {folder}; `diffquant export` makes such a folder of a checkpoint")
    if folder.suffix == ".onnx" and folder.is_file():
        raise CheckpointError(f"{folder} is a file; give the folder that it is in, {folder.parent}")
    if folder.suffix.lower() == ".gguf" or (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} is a checkpoint and no export: `diffquant export` makes one of it, and `diffquant generate` "
            "continues texts with it as it is"
        )
    raise CheckpointError(f"{folder} has no {MODEL_FILE}; `diffquant export` makes such a folder")


def layout_of(folder: Path) -> Layout:
    """The layout of an exported folder, by the names of its files alone."""
    return PORTABLE if (folder / PORTABLE.model).is_file() else PLAIN


def model_file(folder: Path) -> Path:
    """The graph of an exported folder."""
    return folder / layout_of(folder).model
