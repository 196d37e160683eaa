"""Exported folders in ONNX Runtime: sessions, generation, evaluation."""
