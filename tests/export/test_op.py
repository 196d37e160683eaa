"""The op's schema and its specification page say the same."""

import re
from pathlib import Path

import pytest
from onnx.defs import OpSchema

from diffquant.errors import UsageError
from diffquant.export.graph.op import OpAttributes, schema

PAGE = (Path(__file__).parents[2] / "docs" / "differential-attention-op.md").read_text()


def table(heading):
    """Rows of the section's first table, code marks removed."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in row] for row in rows[2:]]


def of_schema(parameters):
    optional = OpSchema.FormalParameterOption.Optional
    return [
        [str(i), p.name, p.type_str + (", optional" if p.option == optional else "")] for i, p in enumerate(parameters)
    ]


@pytest.mark.parametrize("heading", ["Inputs", "Outputs"])
def test_page_and_schema_name_the_same_inputs_and_outputs(heading):
    parameters = schema().inputs if heading == "Inputs" else schema().outputs
    types = [re.sub("; .*", "", row[2]) for row in table(heading)]
    assert [[*row[:2], kind] for row, kind in zip(table(heading), types, strict=True)] == of_schema(parameters)


@pytest.mark.parametrize("heading", ["Inputs", "Outputs"])
def test_page_and_schema_name_the_same_shapes(heading):
    parameters = schema().inputs if heading == "Inputs" else schema().outputs
    assert [row[3] for row in table(heading)] == [p.description for p in parameters]


def test_page_schema_and_attributes_agree():
    listed = {row[0]: row[1] for row in table("Attributes")}
    assert listed == {name: str(a.type).split(".")[-1] for name, a in schema().attributes.items()}
    assert all(a.required for a in schema().attributes.values())
    assert list(listed) == list(OpAttributes(2, 1, 2, 0.5).to_dict())


@pytest.mark.parametrize(
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
        OpAttributes(**right | wrong)
