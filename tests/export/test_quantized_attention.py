"""`QuantizedAttention`, by the native kernel and by its body, against torch's own attention in float64."""

from itertools import pairwise

import numpy as np
import pytest
from onnx import TensorProto

from tests.support.attention_cases import codes_in
from tests.support.head_cases import HeadCase, feed
from tests.support.native_cases import session
from tests.support.native_kernels import count_attention_calls
from tests.support.tables import in_one_test


def call_of(library, case, **options):
    started = session(case.one_node(**options), library)
    return lambda inputs: started.run(None, inputs)


def assert_close(actual, wanted, atol=2e-5):
    assert not np.isnan(actual).any()
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=atol)


def assert_codes(case, inputs, caches, rows):
    """Each code in the caches' first rows is next to the number that it rounds."""
    limit = 2 ** (case.bits - 1)
    for cache, exact in zip(caches, case.quotients(inputs, rows), strict=True):
        # A key on the border between two codes may fall either way after its rotation in float32.
        assert np.abs(codes_in(cache, case.bits, rows) - np.clip(exact, 1 - limit, limit - 1)).max() < 0.5 + 1e-4


def check_calls(call, case, inputs, past, *ends):
    """Compare calls that end at these tokens, each behind the one before it, with torch's attention."""
    for start, end in pairwise((0, *ends)):
        tokens = slice(start, end)
        output, *past = call(feed(inputs, tokens, past))
        assert_codes(case, inputs, past, end)
        assert_close(output, case.expected(inputs, tokens, past))


@pytest.mark.parametrize("bits", [8, 6, 4])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (9, 3), (5, 1)], ids=["mha", "gqa2", "gqa3", "mqa"])
@pytest.mark.parametrize("width", [8, 20, 64, 128])
def test_prefill_chunk_and_decode_equal_torch(kernel, width, heads, kv_heads, bits):
    case = HeadCase(bits, heads, kv_heads, width)
    call = call_of(kernel, case)
    for length, rows in ((1, 4), (17, 0), (64, 80), (129, 150)):
        check_calls(call, case, case.inputs(1, length + 12), case.past(1, rows), length, length + 11, length + 12)


@pytest.mark.parametrize("rope", ["", "interleaved"])
def test_other_rotations_equal_torch(kernel, rope):
    case = HeadCase(width=20, rope=rope)
    check_calls(call_of(kernel, case), case, case.inputs(2, 33), case.past(2, 0), 30, 33)


@pytest.mark.parametrize("window", [1, 5, 40])
def test_a_window_hides_older_keys(kernel, window):
    case = HeadCase(window=window)
    check_calls(call_of(kernel, case), case, case.inputs(1, 70), case.past(1, 0), 60, 69, 70)


@in_one_test("bits", [8, 6, 4])
def test_a_node_without_a_past_is_refused_when_the_model_is_loaded(library, bits):
    with pytest.raises(Exception, match=r"invalid model.*QuantizedAttention"):
        session(HeadCase(bits).one_node(is_cached=False), library)


@pytest.mark.parametrize("rows", [0, 64], ids=["growing cache", "poisoned buffer"])
def test_a_ragged_batch_equals_its_sequences_one_by_one(kernel, rows):
    case, lengths = HeadCase(heads=6, kv_heads=2), [40, 3, 21]
    inputs = case.inputs(3, 44)
    call = call_of(kernel, case)
    output, *past = call(feed(inputs, slice(0, 40), case.past(3, rows), lengths))
    after = [length + 2 for length in lengths]
    chunk = feed(inputs, slice(40, 42), past, after) | {"total_sequence_length": np.array(42, "i4")}
    chunk_output, *past = call(chunk)
    for i, length in enumerate(lengths):
        tokens, own = np.r_[0:length, 40:42], slice(i, i + 1)
        joined = {n: v[own, tokens] if v.ndim == 3 else v for n, v in inputs.items()}
        caches = [cache[own] for cache in past]
        assert_close(output[own, :length], case.expected(joined, slice(0, length), caches))
        assert_close(chunk_output[own], case.expected(joined, slice(length, length + 2), caches))
    assert not output[1, 3:].any()


@pytest.mark.parametrize("bits", [8, 6, 4])
def test_float16_stays_within_its_rounding(kernel, bits):
    case = HeadCase(bits, width=20)
    inputs, past = case.inputs(1, 60), case.past(1, 64)
    half = {n: v if n.endswith("scale") else v.astype("f2") for n, v in inputs.items()}
    wide = {n: v.astype("f4") for n, v in half.items()}
    call = call_of(kernel, case, float_type=TensorProto.FLOAT16)
    for tokens in (slice(0, 50), slice(50, 59), slice(59, 60)):
        output, *past = call(feed(half, tokens, past))
        assert output.dtype == np.float16
        assert_codes(case, wide, past, tokens.stop)
        assert_close(output, case.expected(wide, tokens, past), atol=4e-3)


@in_one_test("bits", [8, 4])
def test_the_body_computes_what_the_kernel_does(library, bits):
    case = HeadCase(bits, heads=6, kv_heads=2, width=32)
    calls = count_attention_calls()
    for registered in (library, None):
        call = call_of(registered, case, has_body=True)
        check_calls(call, case, case.inputs(1, 50), case.past(1, 60), 40, 49, 50)
    assert count_attention_calls() == calls + 3


WRONG_INPUTS = {
    "query": (lambda x: x[..., :-1], r"query is \[1, 9, 63\]: its last axis is no multiple of num_heads 4"),
    "key": (lambda x: x[:, :5], r"key is \[1, 5, 32\], expected \[1, 9, 32\]"),
    "past_value": (lambda x: x[:, :, :3], "past_value is .* expected"),
    "seqlens_k": (lambda x: x + 100, r"seqlens_k\[0\] is 108"),
    "cos_cache": (lambda x: x[:4], r"cos_cache is \[4, 8\], expected at least \[9, 8\]"),
    "v_scale": (lambda x: x[..., :3], r"v_scale is \[1, 2, 1, 3\], expected \[1, 2, 1, 16\]"),
}


@in_one_test("name", WRONG_INPUTS)
def test_wrong_inputs_are_refused_by_name(library, name):
    case = HeadCase()
    change, message = WRONG_INPUTS[name]
    model = case.one_node()
    for value in model.graph.input:
        value.type.tensor_type.ClearField("shape")
    inputs = feed(case.inputs(1, 9), slice(0, 9), case.past(1, 8))
    with pytest.raises(Exception, match=f"diffquant::QuantizedAttention: {message}"):
        session(model, library).run(None, inputs | {name: np.ascontiguousarray(change(inputs[name]))})


@in_one_test(
    ("name", "value", "message"),
    [
        ("kv_num_heads", 3, "kv_num_heads 3 does not divide num_heads 4"),
        ("local_window_size", 0, "local_window_size must be -1 or at least 1"),
        ("kv_bit_width", 4, "kv_bit_width 4 needs a uint8 cache"),
        ("kv_bit_width", 0, "kv_bit_width 0 is for a cache of the input's type"),
    ],
)
def test_wrong_attributes_are_refused_when_the_model_is_loaded(library, name, value, message):
    model = HeadCase().one_node()
    next(each for each in model.graph.node[0].attribute if each.name == name).i = value
    with pytest.raises(Exception, match=f"diffquant::QuantizedAttention: attribute {message}"):
        session(model, library)
