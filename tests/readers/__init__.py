"""Exported folders in readers of ONNX other than diffquant's own runtime; `make test-all ONLY=readers` runs them."""
