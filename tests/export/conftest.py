"""Tests of the exporter need the `onnx` extra and are not collected without it."""

from importlib.util import find_spec

from tests.support.completeness import is_complete

collect_ignore_glob = [] if is_complete() or (find_spec("onnx") and find_spec("onnxruntime")) else ["test_*.py"]
