"""What tests share: models, checkpoints, inputs of kernels and of the ONNX op, kernels compiled without a GPU."""
