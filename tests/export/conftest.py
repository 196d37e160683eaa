"""Tests of the exporter need the `onnx` extra and are not collected without it."""

from importlib.util import find_spec

import pytest

from tests.support.completeness import is_complete

collect_ignore_glob = [] if is_complete() or (find_spec("onnx") and find_spec("onnxruntime")) else ["test_*.py"]


@pytest.fixture(autouse=True)
def few_positions(monkeypatch):
    """Verifications read few positions here, which makes them weaker and fast."""
    from diffquant.export.verification import passages

    monkeypatch.setattr(passages, "LONGEST", 32)
    monkeypatch.setattr(passages, "POSITIONS", 128)
