"""Checkpoints as bytes on disk: safetensors and GGUF, packed weights, files written by rows, atomic folders."""
