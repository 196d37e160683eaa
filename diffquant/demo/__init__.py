"""The demo: Figure 8 on trained models that ship, then SmolLM2-135M from PyPI to 4 bits and ONNX Runtime."""
