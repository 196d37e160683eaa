"""The MLP's activation in a graph, and the op `diffquant::PolyNorm` with its function body."""

from collections.abc import Callable, Mapping

from onnx import FunctionProto, parser

from diffquant.export.graph.nodes import Graph
from diffquant.export.graph.op import DOMAIN
from diffquant.model.activations import POLY_NORM_EPS

POLY_NORM = "PolyNorm"
_FLOAT = 1

# From the gate's name, and the names of the activation's parameters in float32, to the active gate's name.
Emit = Callable[[Graph, str, Mapping[str, str]], str]


def _silu(graph: Graph, gate: str, _parameters: Mapping[str, str]) -> str:
    return graph.add("Mul", gate, graph.add("Sigmoid", gate))


def _poly_norm(graph: Graph, gate: str, parameters: Mapping[str, str]) -> str:
    return graph.add(POLY_NORM, gate, parameters["weight"], parameters["bias"], domain=DOMAIN, epsilon=POLY_NORM_EPS)


EMITTED: Mapping[str, Emit] = {"silu": _silu, "swish": _silu, "poly_norm": _poly_norm}


def functions(hidden_act: str, opset: int) -> list[FunctionProto]:
    """ONNX functions that an activation needs in the graph; empty if standard ops compute it."""
    return [poly_norm_function(opset)] if hidden_act == "poly_norm" else []


def poly_norm_function(opset: int) -> FunctionProto:
    """The op as an ONNX function in standard ops, float32 inside, so that float16 graphs survive cubes.

    Args:
        opset: the model's version of the standard domain, 18 or later.
    """
    return parser.parse_function(
        f'<opset_import: ["" : {opset}], domain: "{DOMAIN}">\n'
        f"{POLY_NORM} <epsilon> (x, weight, bias) => (y)\n{{\n{_TEXT}\n}}"
    )


# Σ wᵢ·xⁱ/√(mean(x²ⁱ) + ε) + b as a polynomial in x whose coefficients are a row's own.
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
