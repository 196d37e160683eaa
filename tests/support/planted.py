"""Exported folders with a fault in them, as a faulty exporter would have written them: the record agrees."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import FunctionProto, NodeProto, TensorProto, helper, numpy_helper

from diffquant.onnx.files import Layout, layout_of
from diffquant.onnx.manifest import FILE
from diffquant.support.digests import FileDigests
from tests.support.stacks import rows_of

LAYER = 1
_RANGE = np.iinfo(np.int64)


@dataclass
class PlantedExport:
    """A copy of an exported folder, open to be damaged.

    Attributes:
        folder: the copy.
        model: its graph, whose data file is edited in place.
    """

    folder: Path
    model: onnx.ModelProto

    @classmethod
    def copy(cls, folder: Path, to: Path) -> "PlantedExport":
        """Copy a folder and open the copy."""
        shutil.copytree(folder, to)
        return cls(to, onnx.load(to / layout_of(to).model, load_external_data=False))

    @property
    def layout(self) -> Layout:
        return layout_of(self.folder)

    def save(self) -> None:
        """Write the graph, and have the record agree with what is there now."""
        onnx.save(self.model, self.folder / self.layout.model)
        record = json.loads((self.folder / FILE).read_text())
        record |= FileDigests.within(self.folder, (self.layout.model, self.layout.data)).to_dict()
        (self.folder / FILE).write_text(json.dumps(record))

    def change(self, name: str, edit: Callable[[np.ndarray], np.ndarray]) -> None:
        """Replace the values of an initializer, or of a matrix in one, by others of the same shape."""
        proto, rows = rows_of(self.model, name)
        if proto.data_location != TensorProto.EXTERNAL:
            proto.CopyFrom(numpy_helper.from_array(edit(numpy_helper.to_array(proto).copy()), name))
            return
        entries = {entry.key: entry.value for entry in proto.external_data}
        dtype = helper.tensor_dtype_to_np_dtype(proto.data_type)
        data = np.memmap(self.folder / self.layout.data, dtype, "r+", int(entries["offset"]), tuple(proto.dims))
        changed = edit(np.array(data[rows]))
        assert (changed != data[rows]).any()
        data[rows] = changed
        data.flush()

    def node(self, output: str) -> NodeProto:
        """The node that makes a value."""
        found: NodeProto = next(node for node in self.model.graph.node if output in node.output)
        return found

    @property
    def body(self) -> FunctionProto:
        function: FunctionProto = self.model.functions[0]
        return function

    def set_attribute(self, name: str, value: float, nodes: Sequence[NodeProto] | None = None) -> None:
        """Change an attribute of every attention node, or of the nodes given."""
        for node in nodes or self.model.graph.node:
            for attribute in node.attribute:
                if attribute.name == name and (nodes or node.domain == "diffquant"):
                    attribute.CopyFrom(helper.make_attribute(name, value))

    def behind(self, output: str, make: Callable[[str, str], list[NodeProto]], **constants: Sequence[int]) -> None:
        """Put nodes behind the one that makes `output`; `make` gets the name of what it made and that of the output."""
        before = f"{output}.before"
        at = next(i for i, node in enumerate(self.model.graph.node) if output in node.output)
        node = self.model.graph.node[at]
        node.output[list(node.output).index(output)] = before
        for number, added in enumerate(make(before, output)):
            self.model.graph.node.insert(at + 1 + number, added)
        self._add_constants(constants)

    def constants(self, **constants: Sequence[int]) -> None:
        """Add int64 vectors."""
        self._add_constants(constants)

    def _add_constants(self, constants: dict[str, Sequence[int]]) -> None:
        held = {tensor.name for tensor in self.model.graph.initializer}
        for name, values in constants.items():
            if name not in held:
                self.model.graph.initializer.append(numpy_helper.from_array(np.array(values, np.int64), name))


def weight(name: str, layer: int = LAYER) -> str:
    """Name of a linear's weight in a layer, without its suffix."""
    room = "self_attn" if name[0] in "qkvo" else "mlp"
    return f"model.layers.{layer}.{room}.{name}_proj.weight"


def present(part: str, layer: int = LAYER) -> str:
    return f"present.{layer}.{part}"


# Edits of a cache as it leaves a layer.


def emptied(export: PlantedExport, output: str) -> None:
    kind = next(value for value in export.model.graph.output if value.name == output).type.tensor_type.elem_type
    zero = helper.make_tensor("zero", kind, [1], [0])
    export.behind(
        output,
        lambda before, after: [
            helper.make_node("Shape", [before], [f"{after}.shape"]),
            helper.make_node("ConstantOfShape", [f"{after}.shape"], [after], value=zero),
        ],
    )


def with_rows(export: PlantedExport, output: str, *spans: tuple[int, int]) -> None:
    """Make a cache of spans of its rows, one after another."""

    def make(before: str, after: str) -> list[NodeProto]:
        parts = [f"{after}.part{number}" for number in range(len(spans))]
        slices = []
        for part, span in zip(parts, spans, strict=True):
            export.constants(**{f"from{edge}": [edge] for edge in span}, axis2=[2])
            slices.append(helper.make_node("Slice", [before, *(f"from{edge}" for edge in span), "axis2"], [part]))
        return [*slices, helper.make_node("Concat", parts, [after], axis=2)]

    export.behind(output, make)


END = int(_RANGE.max)


def gathered(export: PlantedExport, output: str, axis: int, rows: Sequence[int]) -> None:
    """Take a cache's rows along an axis in another order."""
    name = f"rows{axis}." + "".join(map(str, rows))
    export.behind(
        output,
        lambda before, after: [helper.make_node("Gather", [before, name], [after], axis=axis)],
        **{name: rows},
    )


def batch_turned(export: PlantedExport, output: str) -> None:
    """Give each sequence of a batch the cache of another; one sequence alone keeps its own."""
    export.behind(
        output,
        lambda before, after: [helper.make_node("Slice", [before, "last", "first", "axis0", "back"], [after])],
        last=[-1],
        first=[int(_RANGE.min)],
        axis0=[0],
        back=[-1],
    )


# Faults, each of them whole.


def cache_emptied(export: PlantedExport, layer: int = LAYER) -> None:
    """Empty a layer's cache after every call."""
    for part in ("key", "value"):
        emptied(export, present(part, layer))


def row_overwritten(export: PlantedExport) -> None:
    """Overwrite the cache's second row with its first in all layers."""
    for output in export.model.graph.output:
        if output.name.startswith("present."):
            with_rows(export, output.name, (0, 1), (0, 1), (2, END))


def scales_larger(export: PlantedExport, layer: int = LAYER) -> None:
    """Multiply the scales of one of a layer's matrices by 1.05."""
    export.change(f"{weight('up', layer)}_scale", lambda scales: scales * np.float32(1.05))


def pairs_swapped(export: PlantedExport, layer: int = LAYER) -> None:
    """Swap the queries of a layer's first two pairs."""
    attention = next(node for node in export.model.graph.node if node.op_type == "DifferentialAttention")
    pairs = next(attribute.i for attribute in attention.attribute if attribute.name == "num_pairs")
    order = [1, 0, *range(2, pairs)]
    for part in ("codes", "scale"):
        export.change(f"{weight('q', layer)}_{part}", lambda rows: rows.reshape(pairs, -1)[order].reshape(rows.shape))
