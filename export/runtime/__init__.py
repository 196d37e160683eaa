"""Running of exported folders with ONNX Runtime: sessions, text generation and evaluation."""
