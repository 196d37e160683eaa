"""Whoever computes the op against its test vectors, and the vectors against what they are about."""

from dataclasses import replace

import numpy as np
import pytest

from diffquant.errors import ToleranceError
from diffquant.onnx.graph.op import AttentionAttributes
from diffquant.onnx.native import library_path
from tests.conformance import __main__ as program
from tests.conformance.implementations import IMPLEMENTATIONS, judge
from tests.conformance.op_call import OUTPUTS
from tests.conformance.schemas import schema
from tests.conformance.vectors import make_vectors, read_vectors, write_vectors
from tests.support.tables import in_one_test

VECTORS = read_vectors()
PLAIN = AttentionAttributes(4, 2, 1, 0.5)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@in_one_test("vector", VECTORS)
def test_every_implementation_conforms(vector, name):
    verdict = judge(vector, IMPLEMENTATIONS[name])
    assert verdict.passed, f"{verdict}: {verdict.note}"
    is_special = vector.attributes.kv_bit_width == 6 or (vector.attributes.logit_bits and name.startswith("Group"))
    assert (verdict.error is None) == bool(is_special if name != "native kernel" else library_path() is None), (
        verdict.note
    )


def test_the_stored_vectors_are_those_that_the_formula_makes(tmp_path):
    for stored, made in zip(VECTORS, make_vectors(), strict=True):
        assert (stored.name, stored.attributes) == (made.name, made.attributes)
        for name in OUTPUTS:
            np.testing.assert_allclose(stored.outputs[name], made.outputs[name], rtol=1e-6, atol=1e-6)
        for name, value in made.inputs.items():
            assert stored.inputs[name].dtype == value.dtype
            np.testing.assert_allclose(stored.inputs[name], value, rtol=1e-7, atol=0)
    write_vectors(VECTORS, tmp_path / "again.json.xz")
    assert [v.name for v in read_vectors(tmp_path / "again.json.xz")] == [v.name for v in VECTORS]


def test_the_vectors_use_every_input_and_every_attribute():
    used = {name for vector in VECTORS for name in vector.inputs}
    assert used == {parameter.name for parameter in schema().inputs}
    values = {name: {v.attributes.to_dict()[name] for v in VECTORS} for name in PLAIN.to_dict()}
    assert all(len(different) > 1 for different in values.values()), values
    assert values["kv_bit_width"] == {0, 4, 6, 8}
    assert values["logit_granularity"] == {"row", "head", "pair", "tensor"}


@pytest.mark.parametrize("name", ["output", "present_key", "present_value"])
@pytest.mark.parametrize("about", ["generation 1, first call", "8-bit cache, decode"])
def test_a_wrong_value_is_found(name, about):
    vector = next(v for v in VECTORS if v.name == about)
    wrong = {key: value.copy() for key, value in vector.outputs.items()}
    wrong[name].reshape(-1)[3] += 1
    verdict = judge(vector, lambda _vector: wrong)
    assert not verdict.passed
    assert verdict.note == ("" if name == "output" else f"{name} differs")
    assert judge(vector, lambda each: dict(each.outputs)).passed
    assert not judge(vector, lambda each: {k: np.full_like(v, -3) for k, v in each.outputs.items()}).passed


def test_not_a_number_does_not_conform():
    vector = VECTORS[0]
    outputs = dict(vector.outputs) | {"output": np.full_like(vector.outputs["output"], np.nan)}
    assert not judge(vector, lambda _vector: outputs).passed


def test_the_program_prints_a_table_and_fails_where_one_is_wrong(monkeypatch, capsys):
    vector = VECTORS[0]
    monkeypatch.setattr(program, "read_vectors", lambda: [vector])
    program.main(write=False)
    assert vector.name in capsys.readouterr().out
    moved = replace(vector, outputs=dict(vector.outputs) | {"output": vector.outputs["output"] + 1})
    monkeypatch.setattr(program, "read_vectors", lambda: [moved])
    with pytest.raises(ToleranceError, match=f"standard body: {vector.name}"):
        program.main(write=False)
