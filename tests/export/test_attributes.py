"""Attributes of a stranger's model: the native library computes with them or refuses them, and its process goes on."""

import re
import subprocess
import sys

import numpy as np
import onnx
import pytest

from diffquant.errors import UsageError
from diffquant.onnx.graph.op import AttentionAttributes
from tests.export.test_matmul import inputs as matmul_inputs
from tests.export.test_matmul import matmul_model
from tests.support import attention_cases, head_cases
from tests.support.attention_cases import Case
from tests.support.head_cases import HeadCase
from tests.support.native_cases import inputs_of, past_of, session
from tests.support.native_kernels import matmul_instruction_set
from tests.support.tables import in_one_test

# Where 32 and 64 bits end, and numbers of which the product of two or three is 0 in 64 bits, or beyond them.
WHOLES = (0, 1, 2, 3, 4, 5, 8, 9, 16, 256, -1, -2, 7, 2**20, 2**21, 2**22, 2**31 - 1, 2**31, 2**32, 2**33 + 1, 2**61)
WHOLES += (2**62, 2**63 - 1, -(2**31), -(2**62), -(2**63))
FLOATS = (0.0, -0.0, -0.25, 1.0, 1e-45, 3e38, -3e38, np.nan, np.inf, -np.inf)
TEXTS = (b"", b"row", b"head", b"pair", b"tensor", b"tensor\0", b"x" * 15, b"x" * 16, b"\xff" * 4096)
SAMPLES = 400


def _differential():
    case = Case(kv_bits=8, generation=2)
    feed = attention_cases.feed(inputs_of(case, 1, 9), slice(0, 9), past_of(case, 1, 8))
    return attention_cases.one_node(case, None), feed


def _float_cache():
    case = Case(generation=1)
    feed = attention_cases.feed(inputs_of(case, 1, 9), slice(0, 9), past_of(case, 1, 8))
    return attention_cases.one_node(case, None), feed


def _quantized():
    case = HeadCase()
    return case.one_node(), head_cases.feed(case.inputs(1, 9), slice(0, 9), case.past(1, 8))


def _matmul():
    x, stored, scales, _ = matmul_inputs(3, 16, 64, 32, 4)
    model = onnx.load_from_string(matmul_model(stored, scales, 64, 4, 32))
    del model.functions[:]
    return model, {"x": x[None]}


OPS = {
    "DifferentialAttention": _differential,
    "DifferentialAttention over floats": _float_cache,
    "QuantizedAttention": _quantized,
    "MatMulNBits": _matmul,
}


def change(attributes, seed):
    """Replace some attributes; every third time all counts of heads by one number, which their products then have."""
    rng = np.random.default_rng(seed)
    counts = [each for each in attributes if re.search("num_|_heads|signals", each.name)]
    if seed % 3 == 0 and counts:
        number = int(rng.choice(np.array(WHOLES, object)))
        for each in counts:
            each.i = number
        return
    for place in rng.choice(len(attributes), rng.integers(1, 4), replace=False):
        each = attributes[place]
        if each.type == each.FLOAT:
            each.f = rng.choice(FLOATS)
        elif each.type == each.STRING:
            each.s = TEXTS[rng.integers(len(TEXTS))]
        else:
            each.i = int(rng.choice(np.array(WHOLES, object)))


def try_all(op):
    """Open and run a node with many sets of attributes; what neither computes nor is refused by name is an error."""
    from diffquant.onnx.native import library_path

    computed = 0
    for seed in range(SAMPLES):
        model, feed = OPS[op]()
        change(model.graph.node[0].attribute, seed)
        for value in (*model.graph.input, *model.graph.output):
            value.type.tensor_type.ClearField("shape")
        try:
            session(model, library_path()).run(None, feed)
            computed += 1
        except Exception as error:  # the runtime's own exception types differ between its versions
            named = f"diffquant::{op.split()[0]}: "
            if named not in str(error):
                raise AssertionError(f"seed {seed}: {model.graph.node[0].attribute}") from error
    print(f"{computed} of {SAMPLES} computed")


@in_one_test("op", OPS)
def test_any_attributes_are_computed_or_refused_by_name(library, op):
    if op == "MatMulNBits" and not matmul_instruction_set():
        pytest.skip("ONNX Runtime's own products are used here")
    code = f"from tests.export.test_attributes import try_all; try_all({op!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    computed = int(done.stdout.split()[0])
    assert 0 < computed < SAMPLES


@in_one_test("shape", [(0, 2**40, 8), (2**40, 0, 2**21), (0, 1, 2**62)])
def test_sizes_beside_a_zero_whose_products_overflow_are_refused(library, shape):
    model, feed = _float_cache()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    # NumPy has no such array: the graph makes it.
    sizes = onnx.numpy_helper.from_array(np.array(shape, np.int64), "sizes")
    model.graph.initializer.append(sizes)
    node = model.graph.node[0]
    node.input[0] = "vast"
    vast = onnx.helper.make_node("ConstantOfShape", ["sizes"], ["vast"])
    model.graph.node.insert(0, vast)
    kept = [each for each in model.graph.input if each.name != "query"]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    del feed["query"]
    with pytest.raises(Exception, match=r"is too large|expected|[Ii]nteger overflow"):
        session(model, library).run(None, feed)


@in_one_test("scale", [0.0, np.nan, np.inf])
def test_a_scale_that_is_no_factor_is_no_attribute(scale):
    with pytest.raises(UsageError, match=f"scale is {scale}; it must be a finite number other than 0"):
        AttentionAttributes(num_pairs=2, num_kv_pairs=1, generation=1, scale=scale)
