"""Runs exported folders with ONNX Runtime: sessions, generation, evaluation."""
