"""Loads an exported model's graph, and checks its external data without reading it."""

import re
from pathlib import Path, PurePosixPath

import onnx
from onnx import ModelProto, TensorProto

from diffquant.errors import CheckpointError
from diffquant.export.files import check_exported, model_file
from diffquant.formats.folder import leads_inside
from diffquant.support.files import check_plain_inside


def check_external(model: ModelProto, path: Path, folder: Path) -> None:
    """Check that every external tensor lies beside the graph and inside its file.

    Args:
        path: the graph's file.
        folder: exported folder; links lead nowhere but to files in it, or in the blobs of the hub's cache around it.

    Raises:
        CheckpointError: some do not; the message names them all.
    """
    problems: dict[str, None] = {}
    for tensor in model.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            problems |= dict.fromkeys(_problems_of(tensor, path.parent, folder))
    if problems:
        raise CheckpointError(f"{path}: {'; '.join(problems)}; export the model again")


def load_graph(folder: Path) -> ModelProto:
    """An exported model without its external data, which is checked.

    Raises:
        CheckpointError: it is missing, damaged, or refers to data that is.
    """
    check_exported(folder)
    path = model_file(folder)
    try:
        check_plain_inside(folder)
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}: {error}; remove it") from error
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's own exception type is no part of its interface
        raise CheckpointError(f"{path} is damaged ({error}); export the model again") from error
    check_external(model, path, folder)
    return model


def follow_links(model: ModelProto, path: Path) -> Path:
    """Have external tensors named by the file that links lead to, and return its folder.

    Versions of ONNX Runtime differ on which links they follow from a graph to its data.
    """
    folder = path.parent
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                file = (path.parent / entry.value).resolve()
                folder, entry.value = file.parent, file.name
    return folder.resolve()


def has_linked_data(model: ModelProto, path: Path) -> bool:
    """Whether external data is reached by a link."""
    names = {
        entry.value for tensor in model.graph.initializer for entry in tensor.external_data if entry.key == "location"
    }
    return any((path.parent / name).is_symlink() for name in names)


def _problems_of(tensor: TensorProto, beside: Path, folder: Path) -> list[str]:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    name = PurePosixPath(location)
    if not location or name.is_absolute() or ".." in name.parts:
        return [f"{tensor.name} lies outside the folder, at {location!r}"]
    file = beside / location
    if not file.is_file():
        return [f"{location} is missing"]
    if not leads_inside(folder, file):
        return [f"{location} is a link that leads out of the folder"]
    places = {key: entries.get(key, "0") for key in ("offset", "length")}
    odd = [f"{key} {value[:40]!r}" for key, value in places.items() if not re.fullmatch("[0-9]{1,18}", value)]
    if odd:
        return [f"{tensor.name} has {' and '.join(odd)}, which is no number of bytes"]
    end = sum(map(int, places.values()))
    if end > file.stat().st_size:
        return [f"{location} is truncated: it has {file.stat().st_size} bytes, and {tensor.name} ends at {end}"]
    return []
