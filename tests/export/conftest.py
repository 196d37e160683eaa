"""Tests of the exporter need the `onnx` extra and are not collected without it."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("onnx") and find_spec("onnxruntime") else ["test_*.py"]
