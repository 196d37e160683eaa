"""The schemas of the ops of attention and their specification page say the same."""

import re
from pathlib import Path

import pytest
from onnx.defs import OpSchema

from diffquant.errors import UsageError
from diffquant.onnx.graph.body import make_function_body
from diffquant.onnx.graph.op import AttentionAttributes
from diffquant.onnx.graph.ops import (
    causal_convolution_function,
    matmul_function,
    quantized_attention_function,
    selective_scan_function,
)
from tests.conformance.schemas import (
    causal_convolution_schema,
    matmul_schema,
    quantized_attention_schema,
    schema,
    selective_scan_schema,
)
from tests.support.tables import in_one_test

PAGE = (Path(__file__).parents[2] / "docs" / "differential-attention-op.md").read_text()
SCHEMAS = {
    "DifferentialAttention": schema,
    "QuantizedAttention": quantized_attention_schema,
    "MatMulNBits": matmul_schema,
    "CausalConvolution": causal_convolution_schema,
    "SelectiveScan": selective_scan_schema,
}


FUNCTIONS = {
    "DifferentialAttention": lambda: make_function_body("pure", AttentionAttributes(2, 1, 2, 0.5), 8, 23, True),
    "QuantizedAttention": lambda: quantized_attention_function(23, 8, True),
    "MatMulNBits": lambda: matmul_function(23),
    "CausalConvolution": lambda: causal_convolution_function(4, 23),
    "SelectiveScan": lambda: selective_scan_function(23),
}


def table(heading, op="DifferentialAttention"):
    """Rows of the first table in an op's section, code marks removed."""
    title = heading if op == "DifferentialAttention" else f"{heading} of {op}"
    section = re.split("\n##? ", PAGE.split(f"## {title}\n")[1])[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in row] for row in rows[2:]]


def of_schema(parameters):
    optional = OpSchema.FormalParameterOption.Optional
    return [
        [str(i), p.name, p.type_str + (", optional" if p.option == optional else "")] for i, p in enumerate(parameters)
    ]


@pytest.mark.parametrize("op", SCHEMAS)
@pytest.mark.parametrize("heading", ["Inputs", "Outputs"])
def test_page_and_schema_name_the_same_inputs_and_outputs(heading, op):
    parameters, rows = getattr(SCHEMAS[op](), heading.lower()), table(heading, op)
    named = [[*row[:2], re.sub("; .*", "", row[2])] for row in rows]
    assert named == of_schema(parameters)
    assert [row[3] for row in rows] == [p.description for p in parameters]


@in_one_test("op", SCHEMAS)
def test_page_and_schema_name_the_same_attributes(op):
    attributes = SCHEMAS[op]().attributes
    if not attributes:
        assert f"## Attributes of {op}" not in PAGE
        return
    assert {row[0]: row[1] for row in table("Attributes", op)} == {
        name: str(a.type).split(".")[-1] for name, a in attributes.items()
    }
    assert all(a.required for a in attributes.values())


def test_the_page_lists_attributes_as_nodes_have_them():
    assert [row[0] for row in table("Attributes")] == list(AttentionAttributes(2, 1, 2, 0.5).to_dict())


@in_one_test(
    ("wrong", "message"),
    [
        ({"num_kv_pairs": 3}, "does not divide"),
        ({"generation": 3}, "generation is 3"),
        ({"do_rotary": 1}, "reorder the rows"),
        ({"local_window_size": 0}, "local_window_size is 0"),
        ({"kv_bit_width": 5}, "kv_bit_width is 5"),
        ({"logit_bits": 9, "logit_granularity": "block"}, "logit_bits is 9.*'block'"),
    ],
)
def test_attributes_that_mean_nothing_are_refused(wrong, message):
    right = {"num_pairs": 4, "num_kv_pairs": 2, "generation": 1, "scale": 0.25}
    with pytest.raises(UsageError, match=message):
        AttentionAttributes(**right | wrong)
