"""The bodies of the op against `diffquant.attention.naive` in float64."""

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from diffquant.errors import UsageError
from diffquant.onnx.graph.body import make_function_body
from diffquant.onnx.graph.nodes import inline_functions
from diffquant.recipe.scheme import Scheme
from tests.support.attention_cases import (
    Case,
    codes_in,
    empty_past,
    expected,
    feed,
    on_a_lattice,
    one_node,
    quotients,
    random_inputs,
)
from tests.support.tables import in_one_test

CASES = {
    "v1": Case(),
    "v1-mha": Case(pairs=3, kv_pairs=3, width=8, rope=""),
    "v1-mqa": Case(pairs=4, kv_pairs=1),
    "v2": Case(generation=2),
    "v2-half": Case(generation=2, pairs=6, kv_pairs=2, rope="half"),
    "grouped": Case(pairs=8, kv_pairs=2, signals=4),
    "grouped-odd": Case(pairs=6, kv_pairs=1, width=8, signals=3),
    "grouped-v2": Case(generation=2, pairs=12, kv_pairs=3, signals=2, rope="half", gates=("output_gate",)),
    "two-gates": Case(generation=2, gates=("signal_gate",), rope=""),
    "all-gates": Case(pairs=8, kv_pairs=2, signals=2, gates=("signal_gate", "output_gate")),
}


def reference(model):
    evaluator = ReferenceEvaluator(model)
    return lambda inputs: evaluator.run(None, inputs)


def runtime(model):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, inputs)


RUNNERS = {"contrib": ("contrib", runtime), "pure": ("pure", runtime), "reference": ("pure", reference)}


@pytest.fixture(params=RUNNERS)
def run(request):
    kind, start = RUNNERS[request.param]
    return lambda case, **options: start(one_node(case, kind, **options))


@pytest.mark.parametrize("rows", [0, 40], ids=["growing cache", "shared buffer"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_prefill_chunked_prefill_and_decode_equal_naive(run, case, rows):
    inputs = random_inputs(case, batch=1, length=23)
    call = run(case)
    past = empty_past(case, 1, rows)
    for tokens in (slice(0, 9), slice(9, 20), *(slice(i, i + 1) for i in range(20, 23))):
        output, *past = call(feed(inputs, tokens, past))
        assert past[0].shape[2] == max(rows, tokens.stop)
        np.testing.assert_allclose(output, expected(case, inputs, tokens), rtol=0, atol=2e-5)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("case", [CASES["v1"], CASES["v2-half"], Case(generation=2, rope="")], ids=["v1", "v2", "nope"])
def test_beyond_a_range_codes_are_the_largest_on_both_sides(run, case, bits):
    case = replace(case, kv_bits=bits)
    inputs = random_inputs(case, batch=1, length=19)
    inputs |= {name: 4 * inputs[name] for name in ("key", "value")}
    call, past = run(case), empty_past(case, 1)
    for tokens in (slice(0, 16), slice(16, 19)):
        _, *past = call(feed(inputs, tokens, past))
    for cache, exact in zip(past, quotients(case, inputs, 19), strict=True):
        codes, largest = codes_in(cache, bits, 19), 2 ** (bits - 1) - 1
        for is_beyond, code in ((exact < -largest, -largest), (exact > largest, largest)):
            assert is_beyond.sum() > 20
            assert (codes[is_beyond] == code).all()


@pytest.mark.parametrize("kind", ["contrib", "pure"])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantized_cache_needs_a_past_that_tells_its_type(kind, bits):
    with pytest.raises(UsageError, match=f"a {bits}-bit cache needs past_key and past_value"):
        one_node(Case(kv_bits=bits), kind, cached=False)


@pytest.mark.parametrize("shift", ["", ":shift"])
@pytest.mark.parametrize("text", ["4:row", "6:head", "5:pair", "4:tensor"])
@pytest.mark.parametrize("generation", [1, 2])
def test_simulated_logits_of_the_standard_bodies_equal_naive(generation, text, shift):
    case = Case(generation=generation, logits=Scheme.parse(text + shift))
    # A step is a quotient, and ties between codes depend on its rounding: the expected is computed in float32, too.
    inputs = on_a_lattice(case, batch=2, length=17)
    wanted = expected(case, inputs, slice(0, 17), torch.float32)
    runners = [RUNNERS[name] for name in ("pure", "reference")]
    for kind, start in runners:
        output = start(one_node(case, kind))(feed(inputs, slice(0, 17), empty_past(case, 2)))[0]
        np.testing.assert_allclose(output, wanted, rtol=0, atol=1e-5)


@in_one_test("case", CASES.values())
def test_the_pure_body_is_standard_onnx(case):
    model = one_node(case, "pure")
    onnx.checker.check_model(model, full_check=True)
    written_out = inline_functions(model)
    assert {node.domain for node in written_out.graph.node} == {""}
    onnx.checker.check_model(written_out, full_check=True)


def test_what_a_body_cannot_compute_is_refused():
    with pytest.raises(UsageError, match="multiple of 16 channels, not 24"):
        make_function_body("contrib", Case(width=12).attributes, 12, 23)
    with pytest.raises(UsageError, match=r"cannot quantize them.*not 6"):
        make_function_body("contrib", Case(logits=Scheme.parse("4:row"), kv_bits=6).attributes, 16, 23)
    with pytest.raises(UsageError, match="not 6"):
        make_function_body("pure", Case(kv_bits=6).attributes, 16, 23)
