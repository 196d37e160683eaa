"""The ONNX graph: the op, its function bodies, the decoder around it, weights beside it."""
