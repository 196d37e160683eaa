"""RMS norms in a graph: one op from opset 23 on, and what ONNX Runtime and OpenVINO fuse before it."""

import numpy as np

from diffquant.export.graph.nodes import Graph
from diffquant.export.options import DEFAULT_OPSET


def rms_norm(graph: Graph, x: str, weight: str, eps: float, opset: int) -> str:
    """Name of x / √(mean(x²) + eps) · weight over the last axis, computed in float32."""
    if opset >= DEFAULT_OPSET:
        return graph.add("RMSNormalization", x, weight, axis=-1, epsilon=eps)
    wide = graph.wide(x)
    square = graph.add("Pow", wide, graph.constant("norm.two", np.array(2, np.float32)))
    mean = graph.add("ReduceMean", square, graph.int64("norm.axis", (-1,)), keepdims=1)
    least = graph.constant(f"norm.epsilon.{eps:g}", np.array(eps, np.float32))
    root = graph.add("Sqrt", graph.add("Add", mean, least))
    normed = graph.add("Div", wide, root)
    return graph.add("Mul", graph.narrow(normed), weight)
