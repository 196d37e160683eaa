"""Exported folders in readers of ONNX that are not diffquant's own runtime; `make test-readers` runs all of them."""
