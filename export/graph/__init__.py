"""The ONNX graph of an export: ops with their function bodies, the decoder that uses them, and the stored weights."""
