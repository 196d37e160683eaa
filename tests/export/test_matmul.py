"""Products of codes with rounded activations by the native library, against NumPy and among instruction sets."""

import ctypes
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from diffquant.onnx.graph.op import CONTRIB
from diffquant.onnx.graph.ops import matmul_function
from diffquant.onnx.native.build import SOURCES, find_compiler
from diffquant.onnx.options import DEFAULT_OPSET, IR_VERSION
from diffquant.onnx.runtime.session import session_options
from tests.support.native_kernels import count_matmul_calls, matmul_instruction_set
from tests.support.tables import in_one_test

_MODELS = Path(__file__).parent / "intrinsics"
# Heights beside a tile's, widths that no block divides, channels that fill no group; at the end rows for the matrix
# unit, which computes 64 at once, and widths beyond the 768 columns that it expands together.
_SHAPES = [(1, 33, 100, 16), (5, 16, 64, 32), (13, 50, 300, 128), (25, 7, 96, 64), (2, 40, 256, 256)]
_SHAPES += [(37, 33, 100, 16), (33, 50, 800, 32), (66, 17, 1600, 64), (100, 72, 900, 256)]


def inputs(rows, channels, width, block, bits, seed=0, scales_are_short=False):
    """Activations, stored codes [channels, blocks, bytes], scales, and the codes as whole numbers.

    Scales of a bfloat16 checkpoint are short: their last 16 bits are zero, and kernels hold them without.
    """
    rng = np.random.default_rng(seed)
    blocks = -(-width // block)
    codes = rng.integers(0, 2**bits, (channels, blocks * block), np.uint8)
    codes[0], codes[-1] = 0, 2**bits - 1
    stored = codes if bits == 8 else codes[:, 0::2] | codes[:, 1::2] << 4
    scales = (rng.random((channels, blocks)) * 0.02 + 0.005).astype(np.float32)
    if scales_are_short:
        scales = (scales.view(np.uint32) & 0xFFFF0000).view(np.float32)
    x = rng.standard_normal((rows, width)).astype(np.float32)
    x[0, : min(block, width)] = 0
    x[-1] = np.sign(x[-1])  # every activation at its largest code
    return x, np.ascontiguousarray(stored.reshape(channels, blocks, -1)), scales, codes


def product(function, x, stored, scales, block, bits, *first):
    """y [rows, channels] by a function of the library's signature, or None where it refuses."""
    (rows, width), channels = x.shape, len(stored)
    y = np.full((rows, channels), np.nan, np.float32)
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (x, stored, scales, y)]
    sizes = [ctypes.c_int64(size) for size in (rows, channels, width, block, bits)]
    return y if function(*first, *sizes, *pointers) else None


def oracle(x, codes, scales, block, bits):
    """The product in float64 of activations that are rounded by blocks, absmax / 127."""
    rows, width = x.shape
    blocks = np.pad(x.astype(np.float64), ((0, 0), (0, -width % block))).reshape(rows, -1, block)
    scale = np.abs(blocks).max(-1, keepdims=True) / 127
    rounded = np.rint(blocks / np.where(scale == 0, 1, scale)) * scale
    weights = (codes.astype(np.float64) - 2 ** (bits - 1)).reshape(len(codes), -1, block) * scales[..., None]
    return rounded.reshape(rows, -1) @ weights.reshape(len(codes), -1).T


def matmul_model(stored, scales, width, bits, block):
    """Bytes of a model of one product with a function body, y [batch, tokens, channels] of x [batch, tokens, width]."""
    channels = len(stored)
    attributes = {"K": width, "N": channels, "bits": bits, "block_size": block, "accuracy_level": 4}
    node = helper.make_node("MatMulNBits", ["x", "codes", "scales"], ["y"], domain="diffquant", **attributes)
    values = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "tokens", width])]
    results = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "tokens", channels])]
    constants = [numpy_helper.from_array(stored, "codes"), numpy_helper.from_array(scales, "scales")]
    domains = {"": DEFAULT_OPSET, CONTRIB: 1, "diffquant": 2}
    return helper.make_model(
        helper.make_graph([node], "product", values, results, constants),
        opset_imports=[helper.make_opsetid(*domain) for domain in domains.items()],
        ir_version=IR_VERSION,
        functions=[matmul_function(DEFAULT_OPSET)],
    ).SerializeToString()


@pytest.fixture(scope="module")
def modelled(tmp_path_factory):
    """Products by instruction sets that this machine may lack, with their intrinsics spelled out in C++."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = tmp_path_factory.mktemp("modelled") / "libmodelled.so"
    sources = [SOURCES / f"matmul_{name}.cc" for name in ("plain", "avx512vnni", "amx", "neon")]
    options = ["-std=c++17", "-O1", "-fPIC", "-shared", f"-I{_MODELS}", f"-I{SOURCES}"]
    subprocess.run([compiler, *options, *map(str, sources), str(_MODELS / "run.cc"), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("scales_are_short", [False, True], ids=["float32-scales", "bfloat16-scales"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", _SHAPES, ids=str)
def test_every_instruction_set_gives_the_plain_one_s_bits_and_numpy_s_product(library, shape, bits, scales_are_short):
    x, stored, scales, codes = inputs(*shape, bits, scales_are_short=scales_are_short)
    native, block = ctypes.CDLL(str(library)), shape[3]
    plain = product(native.diffquant_matmul, x, stored, scales, block, bits, b"plain")
    wanted = oracle(x, codes, scales, block, bits)
    np.testing.assert_allclose(plain, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max())
    for name in (b"avx2", b"avx512vnni", b"amx", b"neon"):
        given = product(native.diffquant_matmul, x, stored, scales, block, bits, name)
        assert given is None or given.tobytes() == plain.tobytes(), name


@pytest.mark.parametrize("scales_are_short", [False, True], ids=["float32-scales", "bfloat16-scales"])
@pytest.mark.parametrize("name", [b"avx512vnni", b"amx", b"neon"])
@pytest.mark.parametrize("bits", [4, 8])
def test_instruction_sets_of_other_machines_give_the_same_bits_on_a_model_of_them(
    modelled, name, bits, scales_are_short
):
    for shape in _SHAPES:
        x, stored, scales, _ = inputs(*shape, bits, scales_are_short=scales_are_short)
        plain = product(modelled.modelled_matmul, x, stored, scales, shape[3], bits, b"plain")
        given = product(modelled.modelled_matmul, x, stored, scales, shape[3], bits, name)
        assert given.tobytes() == plain.tobytes(), shape


def test_what_is_not_finite_makes_its_own_row_nan(library):
    x, stored, scales, _ = inputs(4, 16, 64, 32, 4)
    x[1, 3], x[2, 40] = np.nan, np.inf
    y = product(ctypes.CDLL(str(library)).diffquant_matmul, x, stored, scales, 32, 4, b"plain")
    assert np.isnan(y[1:3]).all()
    assert np.isfinite(y[[0, 3]]).all()


@in_one_test("bits", [4, 8])
def test_sessions_run_the_library_s_product_where_it_is_registered_and_the_body_elsewhere(library, bits):
    x, stored, scales, codes = inputs(30, 40, 100, 32, bits)
    model = matmul_model(stored, scales, 100, bits, 32)
    wanted = oracle(x, codes, scales, 32, bits)
    for native in (True, False):
        session = ort.InferenceSession(model, session_options(2, native), providers=["CPUExecutionProvider"])
        calls = count_matmul_calls()
        (y,) = session.run(None, {"x": x.reshape(3, 10, 100)})
        assert count_matmul_calls() == calls + (native and matmul_instruction_set() is not None)
        assert y.shape == (3, 10, 40)
        np.testing.assert_allclose(y.reshape(30, 40), wanted, rtol=0, atol=0.02 * np.abs(wanted).max())


def test_threads_of_a_session_give_one_thread_s_bits(library):
    x, stored, scales, _ = inputs(150, 200, 800, 32, 4)
    model = matmul_model(stored, scales, 800, 4, 32)
    native = ctypes.CDLL(str(library)).diffquant_matmul
    name = matmul_instruction_set()
    if name is None:
        pytest.skip("this processor has no kernel that beats ONNX Runtime's products")
    wanted = product(native, x, stored, scales, 32, 4, name.encode())
    for threads in (1, 2, 4):
        session = ort.InferenceSession(model, session_options(threads), providers=["CPUExecutionProvider"])
        (y,) = session.run(None, {"x": x.reshape(1, 150, 800)})
        assert y.tobytes() == wanted.tobytes(), threads


_DENIED = """
import ctypes, sys

libc = ctypes.CDLL(None, use_errno=True)


class Stack(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]


memory = ctypes.create_string_buffer(8192)  # enough for a signal, and too little for one beside tiles
assert libc.sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 8192)), None) == 0
library = ctypes.CDLL(sys.argv[1])
library.diffquant_matmul_kernel_name.restype = ctypes.c_char_p
print(library.diffquant_matmul_kernel_name().decode(), library.diffquant_use_matmul_kernel(b"amx"))
"""


@pytest.mark.skipif(matmul_instruction_set() != "amx", reason="this processor has no matrix unit")
def test_where_the_system_denies_its_tiles_the_matrix_unit_is_left_alone(library):
    ran = subprocess.run([sys.executable, "-c", _DENIED, str(library)], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["avx512vnni", "0"]
