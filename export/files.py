"""Names of an exported folder's files. They stand alone: recognizing such a folder must not import onnx."""

from dataclasses import dataclass
from pathlib import Path

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


def layout_of(folder: Path) -> Layout:
    """The layout of an exported folder, by the names of its files alone."""
    return PORTABLE if (folder / PORTABLE.model).is_file() else PLAIN


def model_file(folder: Path) -> Path:
    """The graph of an exported folder."""
    return folder / layout_of(folder).model
