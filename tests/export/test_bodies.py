"""Attributes of nodes against the function bodies that a machine without the native library runs."""

import numpy as np
import onnx
import pytest
from onnx import helper

from diffquant.checkpoints.source import open_source
from diffquant.errors import ToleranceError
from diffquant.onnx import verify
from diffquant.onnx.files import model_file
from diffquant.onnx.graph.plan import attention_spec
from diffquant.onnx.native import OVERRIDE
from diffquant.onnx.verifier import body_problems
from tests.support.planted import PlantedExport
from tests.support.tables import in_one_test

EXPORTS = {
    "V1": ("unilm-v1", {}),
    "V1, 8-bit cache, 4-bit weights": ("unilm-v1-plain", {"kv_bits": 8, "weights": "4:g32"}),
    "V2, no cache": ("unilm-v2-half", {"cache": False}),
    "V2, logits": ("unilm-v2", {"logits": "6:pair:shift", "kv_bits": 4}),
    "grouped": ("motif-grouped", {"dtype": "float16"}),
    "gates": ("gated", {}),
    "Transformer, 8-bit cache": ("llama", {"kv_bits": 8}),
    "Phi-4-mini-flash": ("phi4flash", {"kv_bits": 8}),
    "Motif-3": ("motif3", {"weights": "4:row"}),
    "portable": ("diffllama", {"portable": True}),
}
# Numbers that stand in bodies of one op or another; of the others a body takes the node's own.
WRITTEN = {
    "num_pairs": 8, "num_kv_pairs": 1, "generation": 2, "scale": 0.2525, "do_rotary": 0, "rotary_interleaved": 0,
    "kv_bit_width": 4, "logit_bits": 5, "signals_per_noise": 2, "num_heads": 8,
}  # fmt: skip


@pytest.fixture
def exported(made):
    return lambda name: made(EXPORTS[name][0], **EXPORTS[name][1])


def graph_and_width(checkpoint, folder):
    graph = onnx.load(model_file(folder), load_external_data=False)
    return graph, attention_spec(open_source(checkpoint).architecture).head_dim


@in_one_test("name", EXPORTS)
def test_what_export_writes_agrees_with_itself(exported, name):
    assert body_problems(*graph_and_width(*exported(name))) == []


@in_one_test("name", ["V1", "V2, logits", "grouped"])
def test_each_number_that_a_body_holds_is_compared(exported, name):
    graph, width = graph_and_width(*exported(name))
    node = [each for each in graph.graph.node if each.op_type == "DifferentialAttention"][-1]
    tried = 0
    for attribute in node.attribute:
        value = helper.get_attribute_value(attribute)
        if attribute.name not in WRITTEN or value == WRITTEN[attribute.name]:
            continue
        changed = onnx.ModelProto()
        changed.CopyFrom(graph)
        of_node = next(each for each in changed.graph.node if each.name == node.name)
        of_attribute = next(each for each in of_node.attribute if each.name == attribute.name)
        of_attribute.CopyFrom(helper.make_attribute(attribute.name, WRITTEN[attribute.name]))
        (problem,) = body_problems(changed, width)
        assert problem.startswith(f"{node.name}: "), problem
        tried += 1
    assert tried > 5


@pytest.mark.parametrize("has_library", [True, False], ids=["library", "no library"])
@pytest.mark.parametrize("name", ["V1, 8-bit cache, 4-bit weights", "Motif-3"])
def test_a_scale_one_hundredth_off_in_one_node_is_refused_with_and_without_a_library(
    exported, tmp_path, monkeypatch, request, name, has_library
):
    if has_library:
        request.getfixturevalue("library")
    else:
        monkeypatch.setenv(OVERRIDE, "")
    checkpoint, folder = exported(name)
    planted = PlantedExport.copy(folder, tmp_path / "planted")
    node = [each for each in planted.model.graph.node if each.op_type == "DifferentialAttention"][-1]
    scale = next(each.f for each in node.attribute if each.name == "scale")
    planted.set_attribute("scale", scale * 1.01, [node])
    planted.save()
    named = "(GroupQueryAttention's scale|Constant's value_float)"
    with pytest.raises(ToleranceError, match=rf"{node.name}: {named} is .* in its attributes, but "):
        verify(planted.folder, checkpoint, threads=1)


def test_a_body_that_is_not_there_is_named(exported):
    graph, width = graph_and_width(*exported("V1"))
    del graph.functions[:]
    assert all("has no body of DifferentialAttention" in each for each in body_problems(graph, width))


def test_an_attribute_that_is_no_number_of_the_op_is_named(exported):
    graph, width = graph_and_width(*exported("V1"))
    node = next(each for each in graph.graph.node if each.op_type == "DifferentialAttention")
    next(each for each in node.attribute if each.name == "scale").f = np.nan
    (problem,) = body_problems(graph, width)
    assert "scale is nan; it must be a finite number" in problem
