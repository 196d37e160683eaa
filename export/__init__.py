"""ONNX: the differential-attention op, the exporter, and running and proving what it wrote.

Needs the `onnx` extra; every module says what of it when it is missing.
"""
