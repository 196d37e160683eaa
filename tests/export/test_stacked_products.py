"""Products with the same input: where their codes are laid out alike they are one, whose numbers are those of each."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import diffquant
from diffquant.checkpoints.source import open_source
from diffquant.onnx import ExportOptions, export, verify
from diffquant.onnx.files import MODEL_FILE
from diffquant.onnx.graph.linears import Linears
from diffquant.onnx.graph.nodes import Graph
from diffquant.onnx.graph.plan import plan_export
from diffquant.onnx.graph.streaming import assign_offsets, write_data_file
from tests.support.checkpoints import write_checkpoint

ROOM = "model.layers.0.self_attn."
NAMES = ("q_proj", "k_proj", "v_proj")


def outputs(folder, plan, together, rows):
    """The products of seeded activations with q, k and v, as one or each by itself."""
    graph = Graph(TensorProto.FLOAT)
    x = graph.input("x", TensorProto.FLOAT, [1, rows, plan.config.hidden_size])
    linears = Linears(graph, plan.options)
    matrices = [plan.matrices[f"{ROOM}{name}.weight"] for name in NAMES]
    sets = [matrices] if together else [[matrix] for matrix in matrices]
    products = [name for each in sets for name in linears.add_products(x, each)]
    for name in products:
        graph.outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    # By ONNX Runtime's own op, of which there is no kernel of ours to agree with itself.
    for node in graph.nodes:
        node.domain = "" if node.op_type == "Split" else "com.microsoft"
    folder.mkdir()
    placed, size = assign_offsets(linears.streamed, "model.onnx.data")
    write_data_file(folder / "model.onnx.data", linears.streamed, placed, size, lambda *_: None)
    model = graph.model(linears.with_views(placed), 23, {"com.microsoft": 1})
    onnx.save(model, folder / MODEL_FILE)
    activations = np.random.default_rng(0).standard_normal((1, rows, plan.config.hidden_size)).astype(np.float32)
    session = ort.InferenceSession(folder / MODEL_FILE, providers=["CPUExecutionProvider"])
    return [node.op_type for node in graph.nodes], session.run(products, {"x": activations})


@pytest.mark.parametrize("weights", ["4:g32", "8:row", "3:g16", "6:g64"])
@pytest.mark.parametrize("rows", [1, 9])
def test_one_product_has_the_bits_of_three(tmp_path, weights, rows):
    source = open_source(write_checkpoint(tmp_path / "source", "unilm-v1-plain", intermediate_size=192))
    plan = plan_export(source, ExportOptions.parse(weights))
    ops, one = outputs(tmp_path / "one", plan, True, rows)
    each_ops, each = outputs(tmp_path / "each", plan, False, rows)
    assert ops == ["MatMulNBits", "Split"]
    assert each_ops == ["MatMulNBits"] * 3
    for mine, theirs in zip(one, each, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_matrices_of_other_bits_or_groups_stay_apart(tmp_path):
    source = write_checkpoint(tmp_path / "source", "diffllama")
    overrides = {"*.layers.0.self_attn.v_proj": "8:g32", "*.layers.1.mlp.up_proj": "4:g16", "*.0.mlp.up_proj": "3:g32"}
    diffquant.quantize(source, tmp_path / "low", diffquant.Recipe.of(weights="4:g32", overrides=overrides))
    export(tmp_path / "low", tmp_path / "out")
    model = onnx.load(tmp_path / "out" / MODEL_FILE, load_external_data=False)
    stacks = {name for node in model.graph.node for name in node.input if "+" in name and name.endswith("codes")}
    # 3 bits are stored in 4: what is laid out alike may differ in what it was rounded to.
    assert stacks == {
        "model.layers.0.mlp.gate_proj+up_proj.weight_codes",
        "model.layers.1.self_attn.q_proj+k_proj+v_proj.weight_codes",
    }
    assert verify(tmp_path / "out", tmp_path / "low", threads=1).passed
