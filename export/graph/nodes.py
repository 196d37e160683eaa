"""Building blocks of a graph: adding nodes and small constants, activation functions and norms."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx
from onnx import (
    FunctionProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
    inliner,
    numpy_helper,
)
from torch import Tensor

from diffquant.errors import DiffQuantError
from diffquant.model.activations import POLY_NORM_EPS
from diffquant.onnx.graph.op import DOMAIN, make_function
from diffquant.onnx.options import DEFAULT_OPSET
from diffquant.support.names import option_name


class Graph:
    """A graph under construction: nodes, constants, inputs and outputs of a model.

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
    def module_scope(self, name: str) -> Iterator[None]:
        """Prefix the names of nodes that are added inside the context with this module's name."""
        outer, self._module = self._module, f"{self._module}{name}."
        try:
            yield
        finally:
            self._module = outer

    @contextmanager
    def collect_nodes(self) -> Iterator[list[NodeProto]]:
        """Collect the nodes that are added inside the context in a separate list, for a subgraph (Loop's body)."""
        outer, self.nodes = self.nodes, []
        try:
            yield self.nodes
        finally:
            self.nodes = outer

    def add(self, op: str, *inputs: str, name: str | None = None, domain: str = "", **attributes: Any) -> str:
        """Add a node with one output, and return the output's name."""
        output = name or self.unused_name(op)
        self.add_with_outputs(op, inputs, [output], domain, **attributes)
        return output

    def split(self, x: str, widths: Sequence[int], names: Sequence[str] = ()) -> list[str]:
        """Add a Split of the last axis into parts of these widths, and return the parts' names."""
        outputs = list(names) or [self.unused_name("Part") for _ in widths]
        self.add_with_outputs(
            "Split", [x, self.int64(f"widths.{'.'.join(map(str, widths))}", widths)], outputs, axis=-1
        )
        return outputs

    def to_float32(self, x: str) -> str:
        """Cast activations to float32 unless they are float32 already, and return the result's name."""
        return x if self.kind == TensorProto.FLOAT else self.add("Cast", x, to=TensorProto.FLOAT)

    def to_activation_type(self, x: str) -> str:
        """Cast a float32 value to the activations' type, and return the result's name."""
        return x if self.kind == TensorProto.FLOAT else self.add("Cast", x, to=self.kind)

    def add_with_outputs(
        self, op: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes: Any
    ) -> None:
        """Add a node with named outputs."""
        self.nodes.append(helper.make_node(op, inputs, outputs, name=outputs[0], domain=domain, **attributes))

    def input(self, name: str, kind: int, shape: Sequence[str | int]) -> str:
        """Add an input of the model, and return its name."""
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, name: str, kind: int, shape: Sequence[str | int]) -> None:
        """Declare the value with this name an output of the model."""
        self.outputs.append(helper.make_tensor_value_info(name, kind, shape))

    def constant(self, name: str, value: np.ndarray) -> str:
        """Add a small tensor to model.onnx itself, and return its name.

        Raises:
            ValueError: another constant has this name.
        """
        tensor = numpy_helper.from_array(np.ascontiguousarray(value), name)
        if self.constants.setdefault(name, tensor) != tensor:
            raise ValueError(f"two constants of a graph are called {name}")
        return name

    def typed_constant(self, name: str, value: Tensor) -> str:
        """Add a constant in the activations' type, and return its name.

        Raises:
            DiffQuantError: the constant has values beyond that type's range.
        """
        with np.errstate(over="ignore"):
            cast = value.numpy().astype(helper.tensor_dtype_to_np_dtype(self.kind))
        if not np.isfinite(cast).all():
            raise DiffQuantError(
                f"{name} has values beyond {cast.dtype}'s range; export with {option_name('dtype', 'float32')}"
            )
        return self.constant(name, cast)

    def int64(self, name: str, values: Sequence[int]) -> str:
        """Add a constant int64 vector, and return its name."""
        return self.constant(name, np.array(values, np.int64))

    def model(
        self, initializers: dict[str, TensorProto], opset: int, domains: Mapping[str, int], ir: int
    ) -> onnx.ModelProto:
        """Return the finished model.

        Args:
            initializers: tensors in the model's data file, by name.
            opset: version of the standard domain.
            domains: versions of the other domains.
            ir: version of the ONNX file format.
        """
        tensors = [*self.constants.values(), *initializers.values()]
        graph = helper.make_graph(self.nodes, "decoder", self.inputs, self.outputs, tensors, value_info=self.values)
        imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(*domain) for domain in domains.items())]
        return helper.make_model(graph, opset_imports=imports, ir_version=ir, producer_name="diffquant")

    def unused_name(self, op: str) -> str:
        """Return a new name for the output of a node, made from the current module and the op."""
        stem = f"{self._module}{op}"
        count = self._name_counts[stem] = self._name_counts.get(stem, 0) + 1
        return stem if count == 1 else f"{stem}_{count}"


def inline_functions(model: ModelProto) -> ModelProto:
    """Replace each call of a function by the function's nodes, and drop unused domains."""
    written_out = inliner.inline_local_functions(model)
    used = {node.domain for node in written_out.graph.node}
    kept = [each for each in written_out.opset_import if each.domain in used]
    del written_out.opset_import[:]
    written_out.opset_import.extend(kept)
    return written_out


POLY_NORM = "PolyNorm"
_FLOAT = 1

# Adds an activation function to the gate with this name; parameters are names of float32 values. Returns the output's.
Emit = Callable[[Graph, str, Mapping[str, str]], str]


def _silu(graph: Graph, gate: str, _parameters: Mapping[str, str]) -> str:
    return graph.add("Mul", gate, graph.add("Sigmoid", gate))


def _poly_norm(graph: Graph, gate: str, parameters: Mapping[str, str]) -> str:
    return graph.add(POLY_NORM, gate, parameters["weight"], parameters["bias"], domain=DOMAIN, epsilon=POLY_NORM_EPS)


EMITTED: Mapping[str, Emit] = {"silu": _silu, "swish": _silu, "poly_norm": _poly_norm}


def activation_functions(hidden_act: str, opset: int) -> list[FunctionProto]:
    """Return the ONNX functions that the MLP's activation function needs; none if standard ops compute it."""
    return [poly_norm_function(opset)] if hidden_act == "poly_norm" else []


def poly_norm_function(opset: int) -> FunctionProto:
    """Return PolyNorm as an ONNX function in standard ops; it computes in float32, since float16 cubes can overflow.

    Args:
        opset: the model's version of the standard domain, 18 or later.
    """
    return make_function(f"{POLY_NORM} (x, weight, bias) => (y)", _TEXT, opset, ["epsilon"])


# Σ wᵢ·xⁱ/√(mean(x²ⁱ) + ε) + b, evaluated as a polynomial in x with coefficients per row.
_TEXT = f"""   wide = Cast <to = {_FLOAT}> (x)
   square = Mul (wide, wide)
   fourth = Mul (square, square)
   sixth = Mul (fourth, square)
   last_axis = Constant <value = int64[1] {{-1}}> ()
   mean2 = ReduceMean (square, last_axis)
   mean4 = ReduceMean (fourth, last_axis)
   mean6 = ReduceMean (sixth, last_axis)
   means = Concat <axis = -1> (mean6, mean4, mean2)
   least = Constant <value_float: float = @epsilon> ()
   raised = Add (means, least)
   roots = Sqrt (raised)
   coefficients = Div (weight, roots)
   a, b, c = Split <axis = -1, num_outputs = 3> (coefficients)
   ax = Mul (a, wide)
   axb = Add (ax, b)
   axbx = Mul (axb, wide)
   axbxc = Add (axbx, c)
   axbxcx = Mul (axbxc, wide)
   out = Add (axbxcx, bias)
   y = CastLike (out, x)"""


def add_rms_norm(graph: Graph, x: str, weight: str, eps: float, opset: int) -> str:
    """Add an RMSNorm x / √(mean(x²) + eps) · weight over the last axis, in float32, and return the result's name."""
    if opset >= DEFAULT_OPSET:
        return graph.add("RMSNormalization", x, weight, axis=-1, epsilon=eps)
    wide = graph.to_float32(x)
    square = graph.add("Pow", wide, graph.constant("norm.two", np.array(2, np.float32)))
    mean = graph.add("ReduceMean", square, graph.int64("norm.axis", (-1,)), keepdims=1)
    least = graph.constant(f"norm.epsilon.{eps:g}", np.array(eps, np.float32))
    root = graph.add("Sqrt", graph.add("Add", mean, least))
    normed = graph.add("Div", wide, root)
    return graph.add("Mul", graph.to_activation_type(normed), weight)
