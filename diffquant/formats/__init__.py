"""Bytes on disk: safetensors and GGUF, packed weights, files written by rows, folders that appear whole."""
