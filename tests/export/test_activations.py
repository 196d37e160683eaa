"""The op PolyNorm's body against its formula in float64, in ONNX Runtime and in onnx's reference evaluator."""

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, checker, helper
from onnx.reference import ReferenceEvaluator

from diffquant.onnx.graph.nodes import POLY_NORM, poly_norm_function
from diffquant.onnx.graph.op import DOMAIN, VERSION
from diffquant.onnx.options import DEFAULT_OPSET, IR_VERSION

WEIGHT, BIAS = np.array([0.2, -0.3, 0.5], "f4"), np.array([0.125], "f4")


def formula(x):
    wide = x.astype("f8")
    powers = (wide**3, wide**2, wide)
    normed = [z / np.sqrt((z * z).mean(-1, keepdims=True) + 1e-6) for z in powers]
    return sum(w * z for w, z in zip(WEIGHT, normed, strict=True)) + BIAS


def one_node(kind):
    node = helper.make_node(POLY_NORM, ["x", "weight", "bias"], ["y"], domain=DOMAIN, epsilon=1e-6)
    inputs = [helper.make_tensor_value_info("x", kind, ["B", "T", "N"])]
    inputs += [helper.make_tensor_value_info(n, TensorProto.FLOAT, [s]) for n, s in (("weight", 3), ("bias", 1))]
    graph = helper.make_graph([node], "one_node", inputs, [helper.make_tensor_value_info("y", kind, ["B", "T", "N"])])
    opsets = [helper.make_opsetid("", DEFAULT_OPSET), helper.make_opsetid(DOMAIN, VERSION)]
    functions = [poly_norm_function(DEFAULT_OPSET)]
    return helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=IR_VERSION)


def in_runtime(model, feed):
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feed)[0]


def in_evaluator(model, feed):
    return ReferenceEvaluator(model).run(None, feed)[0]


@pytest.mark.parametrize("run", [in_runtime, in_evaluator])
@pytest.mark.parametrize(
    ("kind", "dtype", "atol"), [(TensorProto.FLOAT, "f4", 2e-6), (TensorProto.FLOAT16, "f2", 6e-3)]
)
def test_the_body_is_the_formula_also_where_cubes_leave_the_type(run, kind, dtype, atol):
    model = one_node(kind)
    checker.check_model(model, full_check=True)
    x = (np.random.default_rng(0).standard_normal((2, 3, 37)) * np.array([1e-3, 1, 3000])[:, None]).astype(dtype)
    y = run(model, {"x": x, "weight": WEIGHT, "bias": BIAS})
    assert y.dtype == np.dtype(dtype)
    np.testing.assert_allclose(y, formula(x), rtol=0, atol=atol)
