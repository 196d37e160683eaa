"""Whole programs beside their peers: generating, quantizing, scoring, and the ONNX operator's kernel.

Each file is a command of its own; programs.py runs them as sections of the bench, engines.py opens the models.
"""
