"""The ONNX graph of an export: the op, its function bodies, the decoder around it, the weights beside it."""
