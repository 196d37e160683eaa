"""Tests of the exporter need the `onnx` extra and are not collected without it."""

from importlib.util import find_spec

import pytest

from tests.support.completeness import is_complete

collect_ignore_glob = [] if is_complete() or (find_spec("onnx") and find_spec("onnxruntime")) else ["test_*.py"]


@pytest.fixture(autouse=True)
def few_positions(monkeypatch):
    """Verifications read few positions here, which makes them weaker and fast."""
    from diffquant.onnx.verification import passages

    monkeypatch.setattr(passages, "LONGEST", 32)
    monkeypatch.setattr(passages, "POSITIONS", 128)
    monkeypatch.setattr(passages, "BEGINNING", 22)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """`exports_in` a folder of its own, whose exports tests read and do not change."""
    from tests.support.exports import exports_in

    return exports_in(tmp_path_factory.mktemp("made"))


@pytest.fixture
def library():
    """Path of the native library."""
    from diffquant.onnx.native import library_path

    path = library_path()
    if path is None:
        pytest.skip("the native kernel is not built")
    return path


@pytest.fixture(params=("plain", "avx2", "avx512"))
def kernel(request, library):
    """Path of the native library, which uses each instruction set of this machine in turn."""
    from diffquant.onnx.native import attention_instruction_set
    from tests.support.native_kernels import use_attention_kernel

    best = attention_instruction_set()
    if not use_attention_kernel(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield library
    use_attention_kernel(best)
