"""The native kernel against `diffquant.attention.naive` in float64, for every instruction set of this machine."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import numpy as np
import onnxruntime as ort
import pytest
import torch

from diffquant.recipe.scheme import Scheme
from tests.support.attention_cases import Case, codes_in, expected, feed, on_a_lattice, one_node, quotients
from tests.support.native_cases import inputs_of, native, past_of, session
from tests.support.native_kernels import count_attention_calls
from tests.support.tables import in_one_test

ROPE = {1: "interleaved", 2: "half"}


def assert_close(actual, wanted, atol=1e-5):
    assert not np.isnan(actual).any()
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=atol)


def check_calls(call, case, inputs, past, *ends, atol=1e-5):
    """Compare calls that end at these tokens, each behind the one before it, with naive."""
    for start, end in pairwise((0, *ends)):
        tokens = slice(start, end)
        output, *past = call(feed(inputs, tokens, past))
        codes = checked_codes(case, inputs, past, end) if case.kv_bits else None
        assert_close(output, expected(case, inputs, tokens, codes=codes), atol)


def checked_codes(case, inputs, caches, rows):
    """Codes in the first rows of the caches of K and V, each of them next to the number that it rounds."""
    limit = 2 ** (case.kv_bits - 1)
    found = [codes_in(cache, case.kv_bits, rows) for cache in caches]
    for codes, exact in zip(found, quotients(case, inputs, rows), strict=True):
        # A key on the border between two codes may fall either way after its rotation in float32.
        assert np.abs(codes - np.clip(exact, 1 - limit, limit - 1)).max() < 0.5 + 1e-4
    return found


@pytest.mark.parametrize("group", [1, 2, 3], ids=["mha", "gqa2", "gqa3"])
@pytest.mark.parametrize("width", [8, 64, 128])
@pytest.mark.parametrize("generation", [1, 2])
def test_prefill_chunk_and_decode_equal_naive(kernel, generation, width, group):
    case = Case(generation, pairs=2 * group, kv_pairs=2, width=width, rope=ROPE[generation])
    call = native(kernel, case)
    for length, rows in ((1, 4), (17, 0), (64, 80), (100, 0), (129, 150)):
        check_calls(
            call, case, inputs_of(case, 1, length + 12), past_of(case, 1, rows), length, length + 11, length + 12
        )


@pytest.mark.parametrize(("generation", "rope"), [(1, ""), (2, ""), (2, "interleaved")])
def test_other_rotations_equal_naive(kernel, generation, rope):
    case = Case(generation, width=20, rope=rope)
    check_calls(native(kernel, case), case, inputs_of(case, 2, 33), past_of(case, 2, 0), 30, 33)


def test_heads_wider_than_what_is_read_at_once(kernel):
    case = Case(pairs=1, kv_pairs=1, width=1100, rope="", kv_bits=8)
    inputs = inputs_of(case, 1, 30)
    inputs["query"] /= 8
    check_calls(native(kernel, case), case, inputs, past_of(case, 1, 0), 29, 30, atol=1e-4)


@pytest.mark.parametrize("window", [1, 5, 40])
@pytest.mark.parametrize("generation", [1, 2])
def test_a_window_hides_older_keys(kernel, generation, window):
    case = Case(generation, window=window)
    check_calls(native(kernel, case), case, inputs_of(case, 1, 70), past_of(case, 1, 0), 60, 69, 70)


@pytest.mark.parametrize("rows", [0, 64], ids=["growing cache", "poisoned buffer"])
@pytest.mark.parametrize("generation", [1, 2])
def test_a_ragged_batch_equals_its_sequences_one_by_one(kernel, generation, rows):
    case, lengths = Case(generation), [40, 3, 21]
    inputs = inputs_of(case, 3, 44)
    call = native(kernel, case)
    output, *past = call(feed(inputs, slice(0, 40), past_of(case, 3, rows), lengths))
    # Two more tokens each, not at the same positions: a ragged chunk, then one that is a decode step.
    after = [length + 2 for length in lengths]
    chunk = feed(inputs, slice(40, 42), past, after) | {"total_sequence_length": np.array(42, "i4")}
    chunk_output, *past = call(chunk)
    for i, length in enumerate(lengths):
        alone = {n: v[i : i + 1] if n in ("query", "key", "value") or v.ndim == 3 else v for n, v in inputs.items()}
        tokens = np.r_[0:length, 40:42]
        joined = {n: v[:, tokens] if v.ndim == 3 else v for n, v in alone.items()}
        assert_close(output[i : i + 1, :length], expected(case, joined, slice(0, length)))
        assert_close(chunk_output[i : i + 1], expected(case, joined, slice(length, length + 2)))
    assert not output[1, 3:].any()


@pytest.mark.parametrize("bits", [8, 6, 4])
@pytest.mark.parametrize(("generation", "width"), [(1, 64), (2, 64), (1, 4), (2, 20)])
def test_quantized_caches_are_read_as_stored(kernel, generation, width, bits):
    case = Case(generation, width=width, rope=ROPE[generation], kv_bits=bits)
    check_calls(native(kernel, case), case, inputs_of(case, 1, 80), past_of(case, 1, 90), 70, 79, 80, atol=2e-5)


@pytest.mark.parametrize("bits", [8, 6, 4])
@pytest.mark.parametrize("generation", [1, 2])
def test_codes_of_rotated_keys_that_are_exact_are_exact(kernel, generation, bits):
    case = Case(generation, width=20, rope=ROPE[generation], kv_bits=bits)
    inputs = on_a_lattice(case, 2, 40)
    output, *past = native(kernel, case)(feed(inputs, slice(0, 40), past_of(case, 2, 50)))
    limit = 2 ** (bits - 1)
    for cache, wanted in zip(past, quotients(case, inputs, 40), strict=True):
        np.testing.assert_array_equal(codes_in(cache, bits, 40), np.clip(np.rint(wanted), 1 - limit, limit - 1))
    assert_close(output, expected(case, inputs, slice(0, 40)), atol=2e-5)


@pytest.mark.parametrize("bits", [0, 8, 6, 4])
@pytest.mark.parametrize("generation", [1, 2])
def test_float16_stays_within_its_rounding(kernel, generation, bits):
    case = Case(generation, width=20, rope=ROPE[generation], kv_bits=bits)
    inputs = inputs_of(case, 1, 60)
    keep = ("lambda", "k_scale", "v_scale")
    half = {n: v if n in keep else v.astype("f2") for n, v in inputs.items()}
    wide = {n: v.astype("f4") for n, v in half.items()}
    call, past = native(kernel, case, dtype="f2"), past_of(case, 1, 64, "f2")
    for tokens in (slice(0, 50), slice(50, 59), slice(59, 60)):
        output, *past = call(feed(half, tokens, past))
        assert output.dtype == np.float16
        codes = checked_codes(case, wide, past, tokens.stop) if bits else None
        # A float cache holds rotated keys in float16; the rest is float32 until it is written.
        assert_close(output, expected(case, wide, tokens, codes=codes), atol=4e-3)


@pytest.mark.parametrize("lam", [-(2.0**-11), -3 * 2.0**-11, 0.25])
def test_float16_output_rounds_ties_to_even_over_its_whole_range(kernel, lam):
    # With one key both maps are 1, and the output is v·(1 - λ) exactly before it is rounded.
    case = Case(pairs=1, kv_pairs=1, width=6, rope="")
    inputs = {n: v.astype("f2") for n, v in inputs_of(case, 1, 1).items()} | {"lambda": np.array([lam], "f4")}
    values = [1, 1.5, 3, 2.0**-14, 2.0**-15, 3 * 2.0**-24, 2.0**-24, 65504, -1, -65504, 0, 1000.5]
    inputs["value"] = np.array(values, "f2").reshape(1, 1, 12)
    output = native(kernel, case, dtype="f2")(feed(inputs, slice(0, 1), past_of(case, 1, 0, "f2")))[0]
    with np.errstate(over="ignore"):
        wanted = (inputs["value"].astype("f4") * np.float32(1 - lam)).astype("f2")
    np.testing.assert_array_equal(output, wanted)


@pytest.mark.parametrize("shift", ["", ":shift"], ids=["absmax", "shift"])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("granularity", ["row", "head", "pair", "tensor"])
@pytest.mark.parametrize("generation", [1, 2])
def test_simulated_logits_equal_naive(kernel, generation, granularity, bits, shift):
    scheme = Scheme.parse(f"{bits}:{granularity}{shift}")
    case = Case(generation, pairs=6, kv_pairs=2, rope="", logits=scheme)
    inputs = on_a_lattice(case, 2, 34)
    call, past = native(kernel, case), past_of(case, 2, 40)
    for tokens in (slice(0, 29), slice(29, 33), slice(33, 34)):
        output, *past = call(feed(inputs, tokens, past))
        assert_close(output, expected(case, inputs, tokens, torch.float32))


def test_padding_does_not_count_in_a_logit_scale(kernel):
    case = Case(pairs=4, kv_pairs=2, rope="", logits=Scheme.parse("4:tensor"))
    inputs = on_a_lattice(case, 2, 20)
    inputs["query"][1, 12:] *= 100
    output = native(kernel, case)(feed(inputs, slice(0, 20), past_of(case, 2, 0), [20, 12]))[0]
    alone = {n: v[1:, :12] if v.ndim == 3 else v for n, v in inputs.items()}
    assert_close(output[1:, :12], expected(case, alone, slice(0, 12), torch.float32))


def test_logits_far_apart_neither_overflow_nor_turn_into_nan(kernel):
    case = Case(rope="")
    inputs = inputs_of(case, 1, 40)
    inputs["query"] *= 1000
    output = native(kernel, case)(feed(inputs, slice(0, 40), past_of(case, 1, 0)))[0]
    assert_close(output, expected(case, inputs, slice(0, 40)), atol=1e-3)


@pytest.mark.parametrize("length", [3, 40])
def test_nan_in_a_key_reaches_the_queries_that_see_it_and_no_other(kernel, length):
    case = Case(pairs=2, kv_pairs=2, rope="")
    inputs = inputs_of(case, 1, length)
    inputs["key"][0, length - 2, 5] = np.nan
    output = native(kernel, case)(feed(inputs, slice(0, length), past_of(case, 1, 0)))[0][0]
    first_pair = output[:, : case.row]
    assert not np.isnan(first_pair[: length - 2]).any()
    assert np.isnan(first_pair[length - 2 :]).all()
    assert not np.isnan(output[:, case.row :]).any()


def test_threads_do_not_change_a_bit(library):
    case = Case(pairs=6, kv_pairs=3, width=64)
    inputs = inputs_of(case, 2, 130)
    one, two = (native(library, case, threads)(feed(inputs, slice(0, 130), past_of(case, 2, 0))) for threads in (1, 2))
    for alone, together in zip(one, two, strict=True):
        np.testing.assert_array_equal(alone, together)


def test_one_session_serves_several_callers_at_once(library):
    case = Case(width=64)
    call = native(library, case)
    feeds = [feed(inputs_of(case, 1, n), slice(0, n), past_of(case, 1, 0)) for n in (1, 30, 100, 120)] * 5
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(call, feeds))
    for one, inputs in zip(together, feeds, strict=True):
        np.testing.assert_array_equal(one[0], call(inputs)[0])


@in_one_test("bits", [0, 8, 6])
def test_a_bound_cache_is_extended_in_place_and_the_rest_left_alone(library, bits):
    case = Case(kv_bits=bits)
    inputs = inputs_of(case, 1, 12)
    model = one_node(case, None)
    started = session(model, library)
    binding = started.io_binding()
    caches = [ort.OrtValue.ortvalue_from_numpy(cache) for cache in past_of(case, 1, 30)]
    before = [cache.numpy().copy() for cache in caches]
    for name, value in feed(inputs, slice(0, 12), None).items():
        binding.bind_cpu_input(name, value)
    binding.bind_output("output", "cpu")
    for name, cache in zip(("key", "value"), caches, strict=True):
        binding.bind_ortvalue_input(f"past_{name}", cache)
        binding.bind_ortvalue_output(f"present_{name}", cache)
    started.run_with_iobinding(binding)
    assert_close(binding.get_outputs()[0].numpy(), expected(case, inputs, slice(0, 12)), atol=1e-3 if bits else 1e-5)
    for cache, old in zip(caches, before, strict=True):
        np.testing.assert_array_equal(cache.numpy()[:, :, 12:], old[:, :, 12:])
        assert (cache.numpy()[:, :, :12] != old[:, :, :12]).any()


@in_one_test("level", list(ort.GraphOptimizationLevel.__members__.values()))
def test_the_kernel_takes_the_place_of_the_body(library, level):
    case = Case()
    inputs = feed(inputs_of(case, 1, 9), slice(0, 9), past_of(case, 1, 0))
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.register_custom_ops_library(str(library))
    before = count_attention_calls()
    model = one_node(case, "contrib").SerializeToString()
    output = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run(None, inputs)[0]
    assert count_attention_calls() == before + 1
    body = session(one_node(case, "contrib"), None).run(None, inputs)[0]
    assert count_attention_calls() == before + 1
    np.testing.assert_allclose(output, body, rtol=0, atol=1e-5)


FAMILY = {
    "grouped": Case(pairs=8, kv_pairs=2, signals=4),
    "grouped-odd": Case(pairs=9, kv_pairs=1, width=20, signals=3, kv_bits=8),
    "grouped-v2-gated": Case(2, pairs=12, kv_pairs=3, signals=2, rope="half", gates=("output_gate",), kv_bits=4),
    "two-gates": Case(2, rope="", gates=("signal_gate",), window=7),
    "all-gates": Case(pairs=8, kv_pairs=2, signals=2, gates=("signal_gate", "output_gate")),
}


def with_input(name, change):
    return lambda inputs: inputs | {name: np.ascontiguousarray(change(inputs[name]))}


WRONG_INPUTS = {
    "query's axes": (with_input("query", lambda x: x[0]), r"query is \[9, 128\], expected \[B, T, \(h\+n\)·d\]"),
    "query's width": (with_input("query", lambda x: x[..., :-1]), "query is .* no multiple of its heads, .* 8"),
    "key": (with_input("key", lambda x: x[:, :5]), r"key is \[1, 5, 64\], expected \[1, 9, 64\]"),
    "value": (with_input("value", lambda x: x[..., :7]), r"value is \[1, 9, 7\], expected \[1, 9, 64\]"),
    "lambda": (with_input("lambda", lambda x: np.ones(3, "f4")), r"lambda is \[3\], expected \[1\]"),
    "past_key": (with_input("past_key", lambda x: x[..., :5]), "past_key is .* expected"),
    "past_value": (with_input("past_value", lambda x: x[:, :, :3]), "past_value is .* expected"),
    "seqlens_k": (with_input("seqlens_k", lambda x: x + 100), r"seqlens_k\[0\] is 108"),
    "seqlens_k's count": (with_input("seqlens_k", lambda x: np.repeat(x, 2)), r"seqlens_k is \[2\], expected \[1\]"),
    "negative seqlens_k": (with_input("seqlens_k", lambda x: x - 100), r"seqlens_k\[0\] is -92"),
    "total": (with_input("total_sequence_length", lambda x: x - 4), "total_sequence_length 5 is less than the 9 new"),
    "a past that is not there": (
        lambda inputs: inputs | {"seqlens_k": np.array([99], "i4"), "total_sequence_length": np.array(100, "i4")},
        "past_key holds 8 rows, seqlens_k and 9 new tokens imply 91",
    ),
    "cos_cache": (with_input("cos_cache", lambda x: x[:4]), r"cos_cache is \[4, 16\], expected at least \[9, 16\]"),
    "k_scale": (with_input("k_scale", lambda x: x[..., :3]), r"k_scale is \[1, 2, 1, 3\], expected \[1, 2, 1, 32\]"),
}


WRONG_GATES = [
    (with_input("signal_gate", lambda x: x[..., :7]), r"signal_gate is \[1, 9, 7\], expected \[1, 9, 8\]"),
    (with_input("output_gate", lambda x: x[..., :8]), r"output_gate is \[1, 9, 8\], expected \[1, 9, 256\]"),
]
WRONG = [(Case(kv_bits=8), *each) for each in WRONG_INPUTS.values()]


@in_one_test(("case", "change", "message"), [*WRONG, *((FAMILY["all-gates"], *each) for each in WRONG_GATES)])
def test_wrong_inputs_are_refused_by_name(library, case, change, message):
    inputs = feed(inputs_of(case, 1, 9), slice(0, 9), past_of(case, 1, 8))
    model = one_node(case, None)
    for value in model.graph.input:
        value.type.tensor_type.ClearField("shape")
    started = session(model, library)
    with pytest.raises(Exception, match=f"diffquant::DifferentialAttention: {message}"):
        started.run(None, change(inputs))


@in_one_test(
    ("attributes", "message"),
    [
        ({"num_kv_pairs": 3}, "num_kv_pairs 3 does not divide num_pairs 4"),
        ({"generation": 3}, "generation is 3, not 1 to 2"),
        ({"rotary_interleaved": 0}, "generation 1 rotates interleaved channels only"),
        ({"local_window_size": 0}, "local_window_size must be -1 or at least 1"),
        ({"kv_bit_width": 8}, "kv_bit_width 8 needs an int8 cache"),
        ({"logit_bits": 9}, "logit_bits is 9, not 0 to 8"),
        ({"logit_granularity": "block"}, "logit_granularity must be row, head, pair or tensor"),
        ({"scale": None}, "attribute scale is missing"),
    ],
)
def test_wrong_attributes_are_refused_when_the_model_is_loaded(library, attributes, message):
    model = one_node(Case(), None)
    kept = [a for a in model.graph.node[0].attribute if attributes.get(a.name, 0) is not None]
    del model.graph.node[0].attribute[:]
    model.graph.node[0].attribute.extend(kept)
    for attribute in model.graph.node[0].attribute:
        if attribute.name in attributes:
            value = attributes[attribute.name]
            if isinstance(value, str):
                attribute.s = value.encode()
            else:
                attribute.i = value
    with pytest.raises(Exception, match=message):
        session(model, library)


def test_a_quantized_cache_without_scales_is_refused(library):
    case = Case(kv_bits=8)
    model = one_node(case, None)
    model.graph.node[0].input[10] = ""
    inputs = feed(inputs_of(case, 1, 9), slice(0, 9), past_of(case, 1, 0))
    with pytest.raises(Exception, match="k_scale is absent and the cache is quantized"):
        session(model, library).run(None, inputs)


def test_an_empty_batch_and_no_new_tokens_are_nothing_to_do(library):
    case = replace(Case(), rope="")
    call = native(library, case)
    output, *_ = call(feed(inputs_of(case, 0, 4), slice(0, 4), past_of(case, 0, 0)))
    assert output.shape == (0, 4, case.pairs * case.row)
    inputs = inputs_of(case, 1, 4)
    _, *past = call(feed(inputs, slice(0, 4), past_of(case, 1, 0)))
    output, *present = call(feed(inputs, slice(4, 4), past))
    assert output.shape == (1, 0, case.pairs * case.row)
    np.testing.assert_array_equal(present[0], past[0])


@pytest.mark.parametrize("case", FAMILY.values(), ids=FAMILY)
def test_shared_noise_heads_and_gates_equal_naive(kernel, case):
    # Where there are codes, one may fall to its neighbour.
    check_calls(native(kernel, case), case, inputs_of(case, 2, 62), past_of(case, 2, 0), 50, 61, 62, atol=2e-5)


@pytest.mark.parametrize("text", ["8:row", "7:head:shift", "7:pair", "8:tensor"])
def test_rounded_logits_of_shared_noise_heads_equal_naive(kernel, text):
    case = Case(pairs=8, kv_pairs=2, signals=4, logits=Scheme.parse(text))
    inputs = on_a_lattice(case, 1, 40)
    output = native(kernel, case)(feed(inputs, slice(0, 40), past_of(case, 1, 0)))[0]
    assert_close(output, expected(case, inputs, slice(0, 40), torch.float32))


def test_a_node_of_version_1_is_served(library):
    case = Case()
    model = one_node(case, None)
    node = model.graph.node[0]
    del node.input[12:]
    node.attribute.remove(next(a for a in node.attribute if a.name == "signals_per_noise"))
    model.opset_import[1].version = 1
    inputs = inputs_of(case, 1, 9)
    before = count_attention_calls()
    output = session(model, library).run(None, feed(inputs, slice(0, 9), past_of(case, 1, 0)))[0]
    assert count_attention_calls() == before + 1
    assert_close(output, expected(case, inputs, slice(0, 9)))
