"""A graph under construction: nodes in order, each named after its module, and small constants."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper
from torch import Tensor

from diffquant.errors import DiffQuantError
from diffquant.support.spelling import spelled


class Graph:
    """Nodes, constants, inputs and outputs of a model.

    Attributes:
        kind: TensorProto data type of activations.
    """

    def __init__(self, kind: int) -> None:
        self.kind = kind
        self.nodes: list[NodeProto] = []
        self.inputs: list[ValueInfoProto] = []
        self.outputs: list[ValueInfoProto] = []
        self.constants: dict[str, TensorProto] = {}
        # Values whose type is not that of activations.
        self.values: list[ValueInfoProto] = []
        self._module = ""
        self._name_counts: dict[str, int] = {}

    @contextmanager
    def module(self, name: str) -> Iterator[None]:
        """Nodes added inside are named after this module."""
        outer, self._module = self._module, f"{self._module}{name}."
        try:
            yield
        finally:
            self._module = outer

    @contextmanager
    def nested(self) -> Iterator[list[NodeProto]]:
        """Nodes added inside go to the list that this gives, for the body of a node."""
        outer, self.nodes = self.nodes, []
        try:
            yield self.nodes
        finally:
            self.nodes = outer

    def add(self, op: str, *inputs: str, name: str | None = None, domain: str = "", **attributes: Any) -> str:
        """Add a node with one output, and return the output's name."""
        output = name or self.unused_name(op)
        self.add_all(op, inputs, [output], domain, **attributes)
        return output

    def split(self, x: str, widths: Sequence[int], names: Sequence[str] = ()) -> list[str]:
        """Add a node that cuts the last axis, and return its outputs' names."""
        outputs = list(names) or [self.unused_name("Part") for _ in widths]
        self.add_all("Split", [x, self.int64(f"widths.{'.'.join(map(str, widths))}", widths)], outputs, axis=-1)
        return outputs

    def wide(self, x: str) -> str:
        """Name of activations in float32."""
        return x if self.kind == TensorProto.FLOAT else self.add("Cast", x, to=TensorProto.FLOAT)

    def narrow(self, x: str) -> str:
        """Name of what is in float32 in the activations' type."""
        return x if self.kind == TensorProto.FLOAT else self.add("Cast", x, to=self.kind)

    def add_all(
        self, op: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes: Any
    ) -> None:
        """Add a node with named outputs."""
        self.nodes.append(helper.make_node(op, inputs, outputs, name=outputs[0], domain=domain, **attributes))

    def input(self, name: str, kind: int, shape: Sequence[str | int]) -> str:
        """Add an input of the model, and return its name."""
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, name: str, kind: int, shape: Sequence[str | int]) -> None:
        """Make a value an output of the model."""
        self.outputs.append(helper.make_tensor_value_info(name, kind, shape))

    def constant(self, name: str, value: np.ndarray) -> str:
        """Add a small tensor to model.onnx itself, and return its name.

        Raises:
            ValueError: the name stands for another value already.
        """
        tensor = numpy_helper.from_array(np.ascontiguousarray(value), name)
        if self.constants.setdefault(name, tensor) != tensor:
            raise ValueError(f"two constants of a graph are called {name}")
        return name

    def typed(self, name: str, value: Tensor) -> str:
        """Add a constant in the activations' type, and return its name.

        Raises:
            DiffQuantError: it holds values beyond that type's range.
        """
        with np.errstate(over="ignore"):
            cast = value.numpy().astype(helper.tensor_dtype_to_np_dtype(self.kind))
        if not np.isfinite(cast).all():
            raise DiffQuantError(
                f"{name} holds values beyond {cast.dtype}'s range; export with {spelled('dtype', 'float32')}"
            )
        return self.constant(name, cast)

    def int64(self, name: str, values: Sequence[int]) -> str:
        """Add a constant int64 vector, and return its name."""
        return self.constant(name, np.array(values, np.int64))

    def model(
        self, initializers: dict[str, TensorProto], opset: int, domains: Mapping[str, int], ir: int
    ) -> onnx.ModelProto:
        """The finished model; `initializers` refer to its data file, `domains` are the others' versions."""
        tensors = [*self.constants.values(), *initializers.values()]
        graph = helper.make_graph(self.nodes, "decoder", self.inputs, self.outputs, tensors, value_info=self.values)
        imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(*domain) for domain in domains.items())]
        return helper.make_model(graph, opset_imports=imports, ir_version=ir, producer_name="diffquant")

    def unused_name(self, op: str) -> str:
        """A name for the output of a node of this kind, after the module it is in."""
        stem = f"{self._module}{op}"
        count = self._name_counts[stem] = self._name_counts.get(stem, 0) + 1
        return stem if count == 1 else f"{stem}_{count}"
