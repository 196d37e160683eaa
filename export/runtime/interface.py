"""Loading of an exported graph, with checks of its inputs, outputs and external data before a session is opened."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper

from diffquant.checkpoints.side_files import is_inside_folder_or_cache
from diffquant.errors import CheckpointError
from diffquant.onnx.files import check_exported, model_file
from diffquant.onnx.graph.op import CONTRIB
from diffquant.onnx.graph.ops import MATMUL
from diffquant.support.files import check_no_special_files


def load_graph(folder: Path) -> ModelProto:
    """Load an exported graph without its external data, and check that the data files are complete.

    Raises:
        CheckpointError: the graph or its data is missing or damaged; the message names all tensors without data.
    """
    check_exported(folder)
    path = model_file(folder)
    try:
        check_no_special_files(folder)
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}: {error}; remove it") from error
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's own exception type is no part of its interface
        raise CheckpointError(f"{path} is damaged ({error}); export the model again") from error
    external = (tensor for tensor in model.graph.initializer if tensor.data_location == TensorProto.EXTERNAL)
    found = (_external_problem(tensor, path.parent, folder) for tensor in external)
    if problems := dict.fromkeys(filter(None, found)):
        raise CheckpointError(f"{path}: {'; '.join(problems)}; export the model again")
    return model


def resolve_data_links(model: ModelProto, path: Path) -> Path:
    """Replace names of symbolic links in a graph by the names of the data files that they lead to.

    Only the graph is changed. It then works in all versions of ONNX Runtime, which differ in the links that they
    follow.

    Args:
        path: path of the graph's file.

    Returns:
        Folder of the data files.
    """
    folder = path.parent
    for entry in _data_locations(model):
        file = (path.parent / entry.value).resolve()
        folder, entry.value = file.parent, file.name
    return folder.resolve()


def has_symlinked_data(model: ModelProto, path: Path) -> bool:
    """Return whether some data file of a graph is a symbolic link.

    Args:
        path: path of the graph's file.
    """
    return any((path.parent / name).is_symlink() for name in {entry.value for entry in _data_locations(model)})


def _data_locations(model: ModelProto) -> Iterator[onnx.StringStringEntryProto]:
    """Yield the entry of each external tensor that names its data file."""
    for tensor in model.graph.initializer:
        yield from (entry for entry in tensor.external_data if entry.key == "location")


def _external_problem(tensor: TensorProto, beside: Path, folder: Path) -> str | None:
    """Explain why a data file lacks a tensor, or return None if it has the tensor.

    Args:
        beside: folder of the graph.
        folder: exported folder. Links may lead only to files in it, or to blobs of the hub's cache that it is in.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    name = PurePosixPath(location)
    if not location or name.is_absolute() or ".." in name.parts:
        return f"{tensor.name} lies outside the folder, at {location!r}"
    file = beside / location
    if not file.is_file():
        return f"{location} is missing"
    if not is_inside_folder_or_cache(folder, file):
        return f"{location} is a link that leads out of the folder"
    places = {key: entries.get(key, "0") for key in ("offset", "length")}
    odd = [f"{key} {value[:40]!r}" for key, value in places.items() if not re.fullmatch("[0-9]{1,18}", value)]
    if odd:
        return f"{tensor.name} has {' and '.join(odd)}, which is not a number of bytes"
    end = sum(map(int, places.values()))
    if end > file.stat().st_size:
        return f"{location} is truncated: it has {file.stat().st_size} bytes, and {tensor.name} ends at {end}"
    return None


# Output name by input name, without the layer: of keys and values per token, and of recurrent states.
_ROWS, _STATES = {"past_key_values": "present"}, {"past_conv": "present_conv", "past_ssm": "present_ssm"}
_PRESENT_OF = _ROWS | _STATES
_TOKENS = ("input_ids", "attention_mask")


@dataclass(frozen=True)
class CacheShape:
    """Names and sizes of a model's cache: keys and values per token, and recurrent states per sequence.

    Attributes:
        inputs: names of the inputs for past keys and values, in the graph's order.
        outputs: names of the outputs for present keys and values, in the same order.
        kv_pairs: number h_kv of KV pairs.
        width: number of stored entries per token and KV pair; an entry has two codes if they have 4 bits.
        dtype: dtype of the entries.
        states: initial recurrent states [1, size, size] by input name; empty if the model has none.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    kv_pairs: int
    width: int
    dtype: np.dtype
    states: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token of one sequence, over all layers."""
        return len(self.inputs) * self.kv_pairs * self.width * self.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's recurrent states."""
        return sum(state.nbytes for state in self.states.values())

    @property
    def state_outputs(self) -> list[str]:
        """Names of the outputs for the updated recurrent states, in the order of `states`."""
        return list(map(_present, self.states))


def read_interface(graph: onnx.GraphProto, file: Path) -> tuple[CacheShape | None, onnx.TypeProto.Tensor]:
    """Check a graph's inputs and outputs, and return the shape of its cache and the type of its logits.

    Args:
        file: path of the graph, for the error message.

    Returns:
        The cache's shape, or None if there is no cache, and the logits' tensor type, [B, 1 or T, vocabulary].

    Raises:
        CheckpointError: the inputs or outputs are not those of an exported model; the message names every reason.
    """
    inputs, outputs = ({v.name: v.type.tensor_type for v in values} for values in (graph.input, graph.output))
    problems = list(_interface_problems(inputs, outputs))
    if problems:
        raise CheckpointError(f"{file} is not a model that diffquant exported: {'; '.join(problems)}; export it again")
    past = list(filter(_is_past, inputs))
    return _cache_shape(inputs, past) if past else None, outputs["logits"]


def _interface_problems(
    inputs: Mapping[str, onnx.TypeProto.Tensor], outputs: Mapping[str, onnx.TypeProto.Tensor]
) -> Iterator[str]:
    past = list(filter(_is_past, inputs))
    unknown = [name for name in inputs if name not in (*_TOKENS, *past)]
    if unknown:
        yield f"it has unknown inputs {', '.join(unknown)}"
    yield from (f"it has no input {name}" for name in _TOKENS if name not in inputs)
    wanted = ["logits", *map(_present, past)]
    yield from (f"it has no output {name}" for name in wanted if name not in outputs)
    logits = outputs.get("logits")
    if logits is not None and (len(logits.shape.dim) != 3 or logits.shape.dim[2].dim_value < 1):
        yield "its logits are not [batch, sequence, vocabulary]"
    if logits is not None and logits.elem_type not in (TensorProto.FLOAT, TensorProto.FLOAT16):
        yield "its logits are not floats"
    shapes = {name: [dim.dim_value for dim in inputs[name].shape.dim] for name in past}
    states, rows = (list(filter(of_kind, past)) for of_kind in (_is_state, lambda name: not _is_state(name)))
    if not all(len(shapes[name]) == 3 and 0 not in shapes[name][2:] for name in states):
        yield "its states are not [batch, size, size]"
    if states and not rows:
        yield "it has states, but no keys"
    kinds = {(inputs[name].elem_type, *shapes[name]) for name in rows}
    if len(kinds) > 1 or any(len(kind) != 5 or 0 in (kind[0], kind[2], kind[4]) for kind in kinds):
        yield "its caches are not [batch, KV pairs, tokens, width] of one type each"


def _cache_shape(inputs: Mapping[str, onnx.TypeProto.Tensor], past: list[str]) -> CacheShape:
    rows = tuple(name for name in past if not _is_state(name))
    kind = inputs[rows[0]]
    _, kv_pairs, _, width = (dim.dim_value for dim in kind.shape.dim)
    states = {
        name: np.zeros((1, *(dim.dim_value for dim in inputs[name].shape.dim[1:])), _dtype(inputs[name]))
        for name in past
        if _is_state(name)
    }
    return CacheShape(rows, tuple(map(_present, rows)), kv_pairs, width, _dtype(kind), states)


def _dtype(kind: onnx.TypeProto.Tensor) -> np.dtype:
    return helper.tensor_dtype_to_np_dtype(kind.elem_type)


def _is_past(name: str) -> bool:
    """Return whether an input is a cache or state from the previous call."""
    return name.partition(".")[0] in _PRESENT_OF


def _is_state(past: str) -> bool:
    """Return whether a cache input is a recurrent state, not keys or values per token."""
    return past.partition(".")[0] in _STATES


def _present(past: str) -> str:
    """Return the name of the output whose value is this input in the next call."""
    kind, _, layer = past.partition(".")
    return f"{_PRESENT_OF[kind]}.{layer}"


# Largest number of weights that are dequantized to float32 in memory: 1 GiB.
_MOST_EXPANDED = 2**28


def set_accuracy_level(graph: onnx.ModelProto, level: int, folder: Path) -> dict[str, np.ndarray]:
    """Change every quantized matmul of a graph to ONNX Runtime's MatMulNBits with this accuracy level.

    At level 1, matmuls with 8-bit weights become float32 matmuls, unless the dequantized weights take too much memory.

    Args:
        level: 4 for int8 activations, 1 for float32 activations.
        folder: folder of the graph's data.

    Returns:
        Dequantized weights by the names of their new initializers, which the session needs in memory; empty at level 4.
    """
    for node in graph.graph.node:
        if node.op_type != MATMUL:
            continue
        # The native library's op rounds activations at any level.
        node.domain = CONTRIB
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = level
    return _expand_wide_codes(graph, folder) if level == 1 else {}


def _expand_wide_codes(graph: onnx.ModelProto, folder: Path) -> dict[str, np.ndarray]:
    """Replace matmuls of float32 activations and 8-bit weights by float32 ones; return the dequantized weights by name.

    ONNX Runtime has no kernel for these: it would dequantize all weights in every call. If there are more than
    `_MOST_EXPANDED` weights, they would take too much memory, and nothing is replaced.
    """
    tensors = {tensor.name: tensor for tensor in graph.graph.initializer}
    products = {}
    for node in graph.graph.node:
        sizes = {attribute.name: attribute.i for attribute in node.attribute}
        is_plain = node.op_type == MATMUL and sizes["bits"] == 8 and len(node.input) == 3
        if is_plain and tensors[node.input[2]].data_type == TensorProto.FLOAT:
            products[node.input[1]] = node, sizes["N"], sizes["K"]
    if sum(height * width for _, height, width in products.values()) > _MOST_EXPANDED:
        return {}
    values = {}
    for name, (node, height, width) in products.items():
        codes, scales = (_read_tensor(tensors[each], folder) for each in node.input[1:3])
        blocks = (codes.astype(np.float32) - 128) * scales[..., None]
        values[f"{name}.values"] = np.ascontiguousarray(blocks.reshape(height, -1)[:, :width])
        shown = graph.graph.initializer.add(name=f"{name}.values", data_type=TensorProto.FLOAT, dims=(height, width))
        shown.data_location = TensorProto.EXTERNAL
        shown.external_data.extend(tensors[name].external_data)
        node.CopyFrom(
            helper.make_node(
                "FusedMatMul", [node.input[0], f"{name}.values"], node.output, name=node.name, domain=CONTRIB, transB=1
            )
        )
    return values


def _read_tensor(tensor: onnx.TensorProto, folder: Path) -> np.ndarray:
    """Read a tensor's external data."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    file, count, offset = folder / entries["location"], int(np.prod(tensor.dims)), int(entries.get("offset", 0))
    return np.fromfile(file, dtype, count, offset=offset).reshape(tensor.dims)
