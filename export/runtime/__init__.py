"""Exported folders run by ONNX Runtime: sessions, generation, evaluation."""
